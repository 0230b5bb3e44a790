"""The live page: one Router's fleet, traffic, hot prefixes and decisions at a glance.

    view.py     what the page is told, as plain values, and how it is put together
    page.py     the page itself, one document made of what follows
    page.html   its parts      page.css   its looks      script/   what fills it, a file for each part

Ids, names and numbers only: no prompt, no text, no block hash. Knows routing's and its watchers' numbers;
knows no HTTP (`router/openai_api/dashboard.py` serves it).
"""
