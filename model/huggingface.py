"""Weights in Hugging Face's names: RoFormerForMaskedLM (rope) and BertForMaskedLM (learned).

The arithmetic is the same. They keep queries, keys and values in three matrices, the tied decoder
and its bias twice, and RoFormer's fixed angles among the weights.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from model.heads import LanguageModel
from model.positions import angles

PREFIXES = {"rope": "roformer", "learned": "bert"}
TIED = {
    "cls.predictions.decoder.weight": "encoder.embeddings.words.weight",
    "cls.predictions.decoder.bias": "head.bias",
}
ANGLES = "roformer.encoder.embed_positions.weight"
# Computed here, or left in files by other heads of the same encoder.
IGNORED = (ANGLES, "bert.embeddings.position_ids", "bert.pooler.", "cls.seq_relationship.")


def to_huggingface(state_dict: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a LanguageModel under Hugging Face's names, tied ones by reference."""
    result: dict[str, Tensor] = {}
    for ours, theirs in _names(config).items():
        result.update(zip(theirs, state_dict[ours].chunk(len(theirs)), strict=True))
    result |= {theirs: state_dict[ours] for theirs, ours in TIED.items()}
    if config.positions == "rope":
        angles_PR = angles(config.max_positions, config.head_size, config.rope_base)
        waves_PD = np.concatenate([np.sin(angles_PR), np.cos(angles_PR)], axis=-1)  # [sin | cos]
        result[ANGLES] = torch.from_numpy(waves_PD.astype(np.float32))
    return result


def from_huggingface(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a LanguageModel's state dict from Hugging Face's weights; tied copies may be absent.

    ValueError for weights that are missing, that have another shape than config says, or that this
    model has no place for.
    """
    names = _names(config)
    known = {*TIED, *(theirs for parts in names.values() for theirs in parts)}
    for name in weights:
        if name not in known and not name.startswith(IGNORED):
            raise ValueError(f"{name}: a positions={config.positions} model has no such weight")
    for name in known - TIED.keys():
        if name not in weights:
            raise ValueError(f"{name}: missing from the weights")
    result = {ours: torch.cat([weights[part] for part in parts]) for ours, parts in names.items()}
    vocab_size = len(result["head.bias"])
    with torch.device("meta"):
        expected = LanguageModel(config, vocab_size=vocab_size).state_dict()
    for ours, value in expected.items():
        if result[ours].shape != value.shape:
            raise ValueError(
                f"{names[ours][0]}: shape {list(result[ours].shape)}, "
                f"but the model's configuration gives {list(value.shape)}"
            )
    return result


def _names(config: ModelConfig) -> dict[str, list[str]]:
    """Return each weight of ours with theirs, which stacked on each other make it."""
    if config.attention != "softmax":
        raise ValueError(f"model.attention={config.attention} has no Hugging Face form")
    if config.positions not in PREFIXES:
        raise ValueError(
            f"model.positions={config.positions} has no Hugging Face form; "
            f"those with one are {' and '.join(PREFIXES)}"
        )
    if config.positions == "rope" and (config.rope_pairs, config.turned_size) != (
        "interleaved",
        config.head_size,
    ):
        raise ValueError(
            f"model.rope_pairs={config.rope_pairs} with rope_size={config.turned_size} has no "
            f"Hugging Face form; that turns interleaved pairs of all {config.head_size} features"
        )
    prefix = PREFIXES[config.positions]
    modules = {
        "encoder.embeddings.norm": [f"{prefix}.embeddings.LayerNorm"],
        "head.transform": ["cls.predictions.transform.dense"],
        "head.norm": ["cls.predictions.transform.LayerNorm"],
    }
    for i in range(config.num_layers):
        ours, theirs = f"encoder.layers.{i}", f"{prefix}.encoder.layer.{i}"
        modules |= {
            f"{ours}.attention.qkv": [
                f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")
            ],
            f"{ours}.attention.output": [f"{theirs}.attention.output.dense"],
            f"{ours}.attention_norm": [f"{theirs}.attention.output.LayerNorm"],
            f"{ours}.feed_forward.up": [f"{theirs}.intermediate.dense"],
            f"{ours}.feed_forward.down": [f"{theirs}.output.dense"],
            f"{ours}.feed_forward_norm": [f"{theirs}.output.LayerNorm"],
        }
    names = {
        "encoder.embeddings.words.weight": [f"{prefix}.embeddings.word_embeddings.weight"],
        "encoder.embeddings.token_types.weight": [
            f"{prefix}.embeddings.token_type_embeddings.weight"
        ],
        "head.bias": ["cls.predictions.bias"],
    }
    if config.positions == "learned":
        names["encoder.embeddings.positions.embedding.weight"] = [
            "bert.embeddings.position_embeddings.weight"
        ]
    for ours, parts in modules.items():
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = [f"{part}.{kind}" for part in parts]
    return names
