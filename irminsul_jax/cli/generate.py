"""`irminsul generate`: one prompt or chat through the engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from irminsul_jax.errors import RequestError


def run_generate(
    model: Path | None,
    prompt: str | None,
    messages: Path | None,
    *,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
) -> None:
    """Prints the text, a usage line on stderr, and last one JSON object. `model` None takes the demo checkpoint."""
    from irminsul_jax.sampling_params import SamplingParams

    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    chat, tools = (None, None) if messages is None else _read_messages(messages)
    progress = Console(stderr=True)
    if model is None:
        from irminsul_jax.replay.demo import demo_checkpoint

        model = demo_checkpoint(progress)
        progress.print("note: the demo model's weights are random, so its text is noise; use -m MODEL for a real one")
    from irminsul_jax.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(model)
    from irminsul_jax.cache import CacheConfig
    from irminsul_jax.engine.engine import Engine
    from irminsul_jax.engine.options import EngineConfig

    engine = Engine(checkpoint, cache=CacheConfig(), options=EngineConfig(max_num_seqs=1))
    if chat is not None:
        output = engine.chat([chat], sampling, tools=tools)[0]
    else:
        output = engine.generate([prompt or ""], sampling)[0]
    if output.error is not None:
        raise RequestError(output.error)
    print(output.text)
    usage = output.usage
    ttft = "not measured" if usage.ttft_ms is None else f"{usage.ttft_ms:,.0f} ms (compiling included)"
    progress.print(
        f"{usage.prompt_tokens} prompt tokens, {usage.generated_tokens} generated ({output.finish_reason}), "
        f"first token after {ttft}",
        highlight=False,
        soft_wrap=True,
    )
    print(
        json.dumps(
            {
                "format_version": 1,
                "model": str(model),
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "usage": dataclasses.asdict(usage),
            }
        )
    )


def _read_messages(path: Path) -> tuple[list[Any], list[Any] | None]:
    """Messages and tools (None if there are none)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); give a JSON file with a list of messages"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON ({error}); give a JSON file with a list of messages") from None
    tools = content.get("tools") if isinstance(content, dict) else None
    content = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(content, list) or not content:
        raise RequestError(f'{path}: needs a list of {{"role", "content"}} messages, or an object with "messages"')
    if tools is not None and not isinstance(tools, list):
        raise RequestError(f'{path}: "tools" must be a list of JSON schema objects')
    return content, tools
