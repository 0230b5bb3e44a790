"""One answer for all Routers: each one's own series, gathered by whichever is asked, and every engine's."""
