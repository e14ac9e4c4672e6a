"""Configuration of the model; torch-free, so that reading a config stays cheap."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

Probability = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: strict and unchangeable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, message) for values that are well-typed but do not fit together."""
        yield from ()


class ModelConfig(Section):
    """Sizes and kinds of a post-LayerNorm encoder; the defaults are the paper's base model."""

    positions: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    """How the model learns the order of tokens."""
    attention: Literal["softmax", "linear"] = "softmax"
    """Softmax of scaled products, or sums of feature maps in linear time (eq. 2 or 19)."""
    features: Literal["elu", "favor"] = "elu"
    """Feature map of linear attention: elu(x) + 1, or the Performer's FAVOR+."""
    num_features: PositiveInt = 256
    """Random features of favor; elu has as many as a head."""
    redraw_steps: NonNegativeInt = 1000
    """Training steps between two draws of favor's features; 0: one draw for the whole run."""
    num_layers: PositiveInt = 12
    hidden_size: PositiveInt = 768
    num_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    """Width of the feed-forward layer."""
    max_positions: PositiveInt = 512
    """Longest piece of text, in tokens."""
    type_vocab_size: PositiveInt = 2
    """Number of token types (segments)."""
    dropout: Probability = 0.1
    """Of the embeddings and of what each sublayer adds."""
    attention_dropout: Probability = 0.0
    """Of the attention weights; above 0 slower: no fused kernel on a CPU, nor torch's on a GPU."""
    layer_norm_eps: PositiveFloat = 1e-12
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of initial matrices and embeddings."""
    rope_base: PositiveFloat = 10000.0
    """Wavelength base of the rotary frequencies, theta_i = base^(-2i/d)."""
    rope_size: PositiveInt | None = None
    """Features of each head that turn, the first ones; all by default."""
    rope_pairs: Literal["interleaved", "halves"] = "interleaved"
    """Which features turn together: 2i and 2i + 1 as in the paper, or i and i + rope_size/2."""

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def has_random_features(self) -> bool:
        """Whether queries and keys pass through FAVOR+."""
        return self.attention == "linear" and self.features == "favor"

    @property
    def query_size(self) -> int:
        """Features of a query or key where they meet: in linear attention, after its map."""
        return self.num_features if self.has_random_features else self.head_size

    @property
    def turned_size(self) -> int:
        """Features of a query or key that turn where positions=rope."""
        return self.rope_size or self.query_size

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what the sizes and kinds do not allow."""
        if self.hidden_size % self.num_heads:
            yield (
                "hidden_size",
                f"{self.hidden_size} is not a multiple of num_heads={self.num_heads}",
            )
        elif self.positions == "rope" and self.has_random_features and self.num_features % 2:
            yield (
                "num_features",
                f"positions=rope turns pairs of features, and {self.num_features} is odd; "
                f"take {self.num_features + 1}",
            )
        elif self.positions == "rope" and self.query_size % 2:
            yield (
                "hidden_size",
                f"positions=rope turns pairs of features, but hidden_size={self.hidden_size} over "
                f"num_heads={self.num_heads} gives heads of {self.head_size}, an odd size",
            )
        elif self.positions == "rope" and (
            self.turned_size % 2 or self.turned_size > self.query_size
        ):
            yield (
                "rope_size",
                f"{self.rope_size} is odd or over the {self.query_size} features of a head",
            )
        elif self.positions == "sinusoidal" and self.hidden_size % 2:
            yield (
                "hidden_size",
                f"positions=sinusoidal needs an even size, got {self.hidden_size}",
            )
        if self.attention == "linear" and self.attention_dropout:
            yield (
                "attention_dropout",
                f"{self.attention_dropout} cannot be had with attention=linear, which never has "
                "the weights in hand; set it to 0",
            )
        if self.attention == "softmax" and self.features != "elu":
            yield (
                "features",
                f"{self.features} is a feature map of attention=linear, and attention is softmax",
            )
