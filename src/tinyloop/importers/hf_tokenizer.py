"""tokenizer.json and the small files beside it → `TokenizerData`.

In: a Hugging Face folder. Out: the tokenizer, or None with a note where the folder has none that can be read. The
text of tokenizer.json is kept as it is; what begins and ends a text is gathered from the files that know it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import FormatError
from ..tokenizer import TokenizerData


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> tuple[TokenizerData | None, list[str]]:
    """Tokenizer and notes. Raises FormatError on a file that cannot be parsed or a token that is not in it."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        other = " (tokenizer.model is not read; save it as tokenizer.json)" if any(folder.glob("*.model")) else ""
        return None, [f"The folder has no tokenizer.json{other}: text cannot be encoded, only token ids."]
    try:
        text = file.read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception; noqa: BLE001
        raise FormatError(f"{file} cannot be read: {error}") from error
    settings = read_json(folder / "tokenizer_config.json")
    special = _special_tokens(read_json(folder / "special_tokens_map.json")) | _special_tokens(settings)
    for name in ("bos_token", "eos_token"):
        if name in special and tokenizer.token_to_id(special[name]) is None:
            raise FormatError(f"{name} {special[name]!r} is not in {file}")
    bos = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    if bos is None and not settings:
        bos = config.get("bos_token_id")
    template, notes = _chat_template(folder, settings)
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = _adds_first(tokenizer, bos)
    if add_bos and bos is None:
        raise FormatError(
            "tokenizer_config.json has add_bos_token=true but no bos_token; name the token or set it false"
        )
    if (size := tokenizer.get_vocab_size()) > config["vocab_size"]:
        notes.append(f"The tokenizer has {size} tokens, the embedding {config['vocab_size']}: the last have no vector.")
    eos = _eos(folder, config, tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None)
    return TokenizerData(text, bos, eos, bool(add_bos), template, special), notes


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise FormatError(f"{file} holds {type(values).__name__}; it must hold an object")
    return values


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Keys such as bos_token, whose value is the text or an object with the text as content."""
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in values.items() if k.endswith("_token")}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


def _eos(folder: Path, config: Mapping[str, Any], named: int | None) -> tuple[int, ...]:
    """Every id that ends a text: those of generation_config.json, or else config.json, and the tokenizer's own."""
    ids = read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ids = list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(ids if named is None else [*ids, named]))


def _adds_first(tokenizer: tokenizers.Tokenizer, bos: int | None) -> bool:
    """Whether the post-processor puts `bos` first: asked of the tokenizer, which may say it in several ways."""
    with_special, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    return bos is not None and with_special[:1] == [bos] and len(with_special) > len(plain)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The file chat_template.jinja, or else the template in the settings; of several named ones the default."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8"), []
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template, []
    named = {t["name"]: t["template"] for t in template}
    others = ", ".join(sorted(named.keys() - {"default"}))
    notes = [f"Of several chat templates the default one is kept, not: {others}."] if others else []
    return named.get("default"), notes
