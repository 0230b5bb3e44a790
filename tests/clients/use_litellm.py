"""litellm, unmodified, against a server. Runs with its own environment's Python: imports nothing of ours.

use_litellm.py URL MODEL        prints one JSON object; exit status 1 when something raised
"""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list otherwise

import litellm

litellm.suppress_debug_info = True  # hints for people, on standard output


def main(url: str, model: str) -> dict[str, object]:
    """Both of its ways to an OpenAI-compatible server, whole and streamed; several answers; and a refusal."""
    found: dict[str, object] = {}
    for provider in ("openai", "hosted_vllm"):
        options = {
            "model": f"{provider}/{model}",
            "api_base": f"{url}/v1",
            "api_key": "none",
            "messages": [{"role": "user", "content": "Tell me of the sea."}],
            "max_tokens": 8,
            "temperature": 0,
        }
        whole = litellm.completion(**options)
        chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
        found[provider] = {
            "content": whole.choices[0].message.content,
            "finish_reason": whole.choices[0].finish_reason,
            "usage": whole.usage.model_dump(),
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "stream_finish_reasons": [
                chunk.choices[0].finish_reason
                for chunk in chunks
                if chunk.choices and chunk.choices[0].finish_reason
            ],
        }
    several = litellm.completion(**{**options, "n": 2})
    found["several"] = [choice.message.content for choice in several.choices]
    try:
        litellm.completion(**{**options, "frequency_penalty": 9})
    except litellm.BadRequestError as error:
        found["refused"] = str(error)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
