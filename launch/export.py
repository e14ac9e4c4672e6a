"""`roformer export`: a run's newest checkpoint as a Hugging Face folder.

The folder loads by `RoFormerForMaskedLM.from_pretrained` (rope) or `BertForMaskedLM` (learned), and
holds the SentencePiece model beside the weights.
"""

import json
import shutil
from pathlib import Path

from rich.console import Console
from safetensors.torch import save_file

from configs.loader import load
from configs.schema import Config
from data_pipeline.specials import Specials
from data_pipeline.tokenizers import load_tokenizer
from launch.errors import EXIT_OK
from model.huggingface import TIED, to_huggingface
from trainer import checkpoint

ARCHITECTURES = {
    "rope": ("roformer", "RoFormerForMaskedLM"),
    "learned": ("bert", "BertForMaskedLM"),
}


def export(run: Path, folder: Path, console: Console) -> int:
    """Write the newest undamaged checkpoint of `run` into `folder`, which must be new."""
    config = load(run / "config.yaml")
    model, objective = config.model, config.objective.kind
    if (model.attention, objective) != ("softmax", "mlm") or model.positions not in ARCHITECTURES:
        raise ValueError(
            f"{run}: Hugging Face has no form of positions={model.positions} with "
            f"attention={model.attention} and objective={objective}; masked softmax models with "
            f"{' or '.join(ARCHITECTURES)} have one"
        )
    found = checkpoint.find(run / "checkpoints", "auto")
    if found is None:
        raise ValueError(f"{run} has no complete checkpoint")
    if folder.exists():
        raise ValueError(f"{folder} is there already; name a new folder")
    tokenizer = load_tokenizer(config.tokenizer)
    saved = checkpoint.load(found)
    weights = {
        name: tensor.contiguous()
        for name, tensor in to_huggingface(saved.weights, config.model).items()
        if name not in TIED  # Hugging Face ties them itself
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = huggingface_config(config, tokenizer.vocab_size, tokenizer.specials)
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    if config.tokenizer.kind != "bytes":
        name = "vocab.txt" if config.tokenizer.kind == "wordpiece" else "tokenizer.model"
        shutil.copyfile(config.tokenizer.model, folder / name)
    ids = ", ".join(f"{k.upper()} {i}" for k, i in tokenizer.specials._asdict().items())
    console.print(
        f"export: {folder}, {settings['architectures'][0]} of {found.name}; its special ids: {ids}"
    )
    return EXIT_OK


def huggingface_config(config: Config, vocab_size: int, specials: Specials) -> dict:
    """Return what `config.json` says of a run's model."""
    model = config.model
    kind, architecture = ARCHITECTURES[model.positions]
    settings = {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": model.type_vocab_size,
        "initializer_range": model.initializer_range,
        "layer_norm_eps": model.layer_norm_eps,
        "pad_token_id": specials.pad,
        "tie_word_embeddings": True,
    }
    if kind == "roformer":
        settings |= {"embedding_size": model.hidden_size, "rotary_value": False}
    return settings
