"""The differences between dense decoders, as plain data.

A ModelSpec describes the computation and WeightNames the weights' names in a checkpoint; both come from a family file.
They know nothing of tensors, files or requests. The idea: a family is a value, not a subclass, so there is one decoder
to make fast and one to test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
NormKind = Literal["rms", "layer"]
QKNorm = Literal["none", "head", "heads", "projection", "rotated"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
RouterScores = Literal["softmax", "sigmoid"]
StateNorm = Literal["none", "gated", "before_gate"]  # an RMSNorm of each group's outputs, after or before their gate


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding (Su et al. 2021, RoFormer) over the first `dim` components of a head, which may be none of
    them, and the growth of queries with their position.

    `kind` is the way that frequencies are stretched to a longer context; the fields below it are read by the kinds
    named.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn, proportional
    original_context: int = 0  # llama3, yarn, longrope: the context length of pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole components
    attention_factor: float = 1.0  # yarn, longrope: multiplies sine and cosine
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, one for each pair
    long_factors: tuple[float, ...] = ()  # longrope: the same beyond `original_context`
    rotating: int = 0  # proportional: components that rotate, with the frequencies of the first of all `dim` (Gemma 4)
    neighbours: bool = False  # a checkpoint's pairs are components 2i and 2i + 1 (GLM), not i and i + dim / 2
    query_beta: float = 0.0  # queries at position p are longer by 1 + beta * log(1 + floor(p / context)) (Llama 4)
    query_context: int = 0
    query_offset: int = 0  # joins the position of a query there
    # interleaved M-RoPE (Qwen3-VL): pairs that rotate by frame, row and column; of its three in turn, the second and
    # the third are of row and column until those have so many, and all others of the frame. Empty: by position
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt-oss's gate (OpenAI 2025): (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within
    plus and minus `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Group-limited routing (DeepSeek-V2, section 2.2.2; DeepSeek-V3, section 2.1.2): a token's experts are all in the
    `per_token` best of `count` groups of neighbours. A group's score is the sum of its `summed` best experts'."""

    count: int
    per_token: int
    summed: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of MLPs (Shazeer et al. 2017): each token takes the `per_token` best of
    `count`, each a gated MLP of `intermediate_size`, weighted by their scores."""

    count: int
    per_token: int
    intermediate_size: int
    layers: tuple[int, ...]  # that have them; others have an MLP
    scores: RouterScores = "softmax"
    normalised: bool = True  # the weights of the chosen ones sum to 1
    min_weight: float = 1e-20  # joins that sum, as the sigmoids of a token may all be 0
    scaling: float = 1.0  # of the weights, after that
    router_bias: bool = False
    selection_bias: bool = False  # joins the scores that experts are chosen by, not their weights (DeepSeek-V3)
    groups: ExpertGroups | None = None
    gate: ClampedSwiGLU | None = None  # in place of the model's activation
    shared_size: int = 0  # intermediate size of the MLP that every token takes beside its experts
    shared_gate: bool = False  # a sigmoid of the input scales that MLP (Qwen2-MoE)
    weight_scales: bool = False  # each expert has a factor of its weight (Gemma 4)
    scaled_inputs: bool = False  # the weights multiply what experts read, not what they return (Llama 4)
    beside_mlp: bool = False  # they run beside the layer's MLP: see `BesideMLP`
    latent_size: int = 0  # they read and return a projection of so many numbers (Nemotron 3); 0: the hidden states


@dataclass(frozen=True, slots=True)
class GlobalHeads:
    """Heads of `layers` that are of another size than those of the others (Gemma 4: of all that do not slide)."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    keys_are_values: bool = False  # values are the keys' projection, before its norm and rope


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """An input of `size` numbers for each layer, made of a token's own embedding for that layer and of the model's
    embedding (Gemma 3n, Google 2025)."""

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads are made of one latent of
    `rank` numbers a token, beside a rotated key of `rope_dim` that all heads share. Only these are cached."""

    rank: int
    query_rank: int | None  # of the latent that queries are made of; None: they are made of the hidden state
    nope_dim: int  # of a head's query and key, those without positions
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (Yang et al. 2025): a causal convolution of `taps` tokens over queries, keys and values, and for
    each value head a matrix (key_dim, value_dim) that the gated delta rule updates."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    interleaved: bool = False  # a checkpoint has the projections of each key head together (Qwen3-Next)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def width(self) -> int:
        """Returns the channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 (Dao & Gu 2024): a causal convolution of `taps` tokens over inputs and the two projections of the state,
    which `groups` of heads share, and for each head a matrix (head_dim, state_dim) that decays with each token."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    conv_bias: bool = True
    bias: bool = False  # of the projection of the hidden states
    out_bias: bool = False  # of the outputs' projection
    norm: StateNorm = "gated"
    multipliers: tuple[float, float, float, float, float] = (1.0,) * 5  # of gate, inputs, B, C, time step (Falcon-H1)
    min_step: float = 0.0  # of a token's time step
    max_step: float = float("inf")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_dim

    @property
    def width(self) -> int:
        """Returns the channels of the convolution."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A SigLIP encoder (Zhai et al. 2023) of square tiles, and the connector to the text model: each square of
    `pixel_shuffle` x `pixel_shuffle` patches becomes one row, which is projected (Idefics3), or, if `averaged`, their
    mean, which is normalised and projected (Gemma 3)."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    image_size: int  # pixels a side of the images that its positions were trained for
    patch_size: int
    pixel_shuffle: int
    image_token_id: int  # the token that a prompt has for each row
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-6
    averaged: bool = False
    whole_tokens: int = 0  # of an image, if these attend to each other in both directions (Gemma 3); else 0
    optional: bool = False  # the text model is run where a checkpoint has no image processor, or on several ranks

    @property
    def parameters(self) -> int:
        """Returns about how many the encoder has."""
        return self.layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class GridVisionSpec:
    """Qwen3.5's encoder of images that keep their shape: each square of `merge` x `merge` patches becomes one row. In
    the text model an image's tokens rotate by row and column (see `Rope.sections`)."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    patch_size: int  # pixels a side
    frames: int  # that a patch has, of a video
    merge: int
    positions: int  # learned ones, of a square
    image_token_id: int
    activation: Activation = "gelu_tanh"
    theta: float = 10_000.0  # of the patches' rotations
    whole_tokens: int = 0  # as `VisionSpec`
    optional: bool = True

    @property
    def parameters(self) -> int:
        """Returns about how many the encoder has."""
        return self.layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class PooledVisionSpec:
    """Gemma 4's encoder of images that keep their shape: the patches of each square of `pool` x `pool` are averaged to
    one row, which is normalised and projected."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    patch_size: int  # pixels a side
    pool: int
    positions: int  # learned ones, of rows and as many of columns
    image_token_id: int  # the token whose embedding of each layer an image's rows have: that of padding
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-6
    theta: float = 100.0  # of the patches' rotations
    clipped: bool = False  # inputs and outputs of projections are held to ranges
    standardized: bool = False  # the means, less a bias and scaled
    whole_tokens: int = 0  # of the largest image, as `VisionSpec`
    windowed: bool = True  # these attend to each other in layers with a window alone
    optional: bool = True

    @property
    def parameters(self) -> int:
        """Returns about how many the encoder has."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden_size * (attention + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class PixtralVisionSpec:
    """Pixtral's encoder of images that keep their shape (Agrawal et al. 2024), with the connector of Mistral 3: each
    square of `merge` x `merge` patches becomes one row."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    patch_size: int  # pixels a side
    merge: int
    image_token_id: int
    activation: Activation = "gelu"
    theta: float = 10_000.0  # of the patches' rotations
    merge_eps: float = 1e-5  # of the norm before patches are merged
    projector_activation: Activation = "gelu"
    projector_bias: bool = False
    whole_tokens: int = 0  # as `VisionSpec`
    optional: bool = True

    @property
    def parameters(self) -> int:
        """Returns about how many the encoder has."""
        return self.layers * self.hidden_size * (4 * self.hidden_size + 3 * self.intermediate_size)


AnyVisionSpec = VisionSpec | GridVisionSpec | PooledVisionSpec | PixtralVisionSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The architecture that the decoder computes. `windows` and `ropes` have one entry per layer.

    A window of w lets position p attend to p-w+1..p, or, if they are `chunked`, from the last multiple of w on; None is
    the whole context. A rope of None leaves queries and keys
    without positions. `pre_norm` normalises the input of attention and MLP, `post_norm` their output before the
    residual is added; Gemma 2 does both. With `latent`, attention sees one K/V head, the cached latent and rotated key,
    whose width is `head_dim`.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    ropes: tuple[Rope | None, ...]
    activation: Activation = "silu"
    norm: NormKind = "rms"  # "layer": less the mean first (Ba et al. 2016), without a bias
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to every norm weight: 1 for Gemma, whose checkpoints store weight - 1
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False  # attention and MLP both read the norm before attention (Wang & Komatsuzaki 2021)
    # "head": over each head; "heads": each has its own weight; "projection": over all heads of the projection at once;
    # "rotated": over each head, without a weight, where a rope rotates it
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True  # else one projection, the activation, and another (Nemotron-H): with recurrent layers alone
    mlp_layers: tuple[int, ...] | None = None  # with an MLP or experts; None: all
    attention_scale: float = 1.0
    sinks: bool = False  # a learned logit of each head joins the denominator of its softmax (gpt-oss)
    attention_softcap: float | None = None  # c * tanh(score / c)
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # of attention's output, as the next ones: of models with recurrent layers alone
    recurrence_multiplier: float = 1.0  # of the recurrence's output
    mlp_multiplier: float = 1.0  # of the MLP's output
    gate_multiplier: float = 1.0  # of the MLP's gate, before its activation
    logits_scaling: float = 1.0  # logits are divided by this
    tied_embeddings: bool = False
    conv_layers: tuple[int, ...] = ()  # these have a gated short convolution in place of attention (LFM2)
    conv_taps: int = 0  # tokens that it mixes: the last one and those before it
    experts: Experts | None = None
    latent: Latent | None = None
    gated_attention: bool = False  # a sigmoid of each query head's own gate multiplies what it attended to (Qwen3-Next)
    recurrent_layers: tuple[int, ...] = ()  # these have a recurrence
    attention_layers: tuple[int, ...] | None = None  # None: those without a convolution or a recurrence
    recurrence: GatedDelta | StateSpace | None = None
    vision: AnyVisionSpec | None = None  # the encoder of a model that reads images
    chunked: bool = False  # its windows (Llama 4)
    value_norm: bool = False  # values are normalised by head, without a weight (Gemma 4, as all that follows)
    global_heads: GlobalHeads | None = None
    kv_sources: tuple[int | None, ...] = ()  # of each layer, the earlier one whose K/V it reads; None: it has its own
    mlp_widths: tuple[int, ...] = ()  # of each layer, where they are not all `intermediate_size`
    per_layer_input: PerLayerInput | None = None
    layer_scales: bool = False  # each layer multiplies the hidden states by a number of its own at its end
    mtp_layers: int = 0  # layers of multi-token prediction, which attend; of a loaded model those that draft

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Returns the layers that attend."""
        if self.attention_layers is not None:
            return self.attention_layers
        others = {*self.conv_layers, *self.recurrent_layers}
        return tuple(index for index in range(len(self.windows)) if index not in others)

    @property
    def shared_kv(self) -> dict[int, int]:
        """Maps layers without keys and values of their own to the earlier layers that they read."""
        return {index: source for index, source in enumerate(self.kv_sources) if source is not None}

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Returns the K/V heads of a layer and their width."""
        if self.global_heads is not None and layer in self.global_heads.layers:
            return self.global_heads.kv_heads, self.global_heads.head_dim
        return self.kv_heads, self.head_dim

    @property
    def uneven_kv(self) -> bool:
        """Returns whether layers differ in the keys and values that they have."""
        return self.global_heads is not None or bool(self.shared_kv)

    @property
    def torch_layers(self) -> bool:
        """Returns whether torch runs the layers on a CPU, on our kernels' products: the layers in C++ have no sinks, no
        latents, no recurrence, no clamped gates, no experts of scaled inputs, no chunks and nothing that Gemma 4 alone
        has."""
        others = self.experts is not None and (self.experts.gate is not None or self.experts.scaled_inputs)
        attends = self.sinks or self.chunked or self.value_norm or self.uneven_kv or self.latent is not None
        return attends or others or self.recurrence is not None or self.per_layer_input is not None or self.layer_scales

    @property
    def windowed_images(self) -> bool:
        """Returns whether tokens of an image attend to later ones of it in layers with a window alone (Gemma 4)."""
        return isinstance(self.vision, PooledVisionSpec) and self.vision.windowed

    def attended_width(self, layer: int) -> int:
        """Returns the width of attention's result, before its output projection."""
        return self.heads * (self.kv_shape(layer)[1] if self.latent is None else self.latent.value_dim)

    def rotated_width(self, layer: int) -> int:
        """Returns the width of the heads that a rope rotates."""
        return self.kv_shape(layer)[1] if self.latent is None else self.latent.rope_dim

    @property
    def longrope_context(self) -> int | None:
        """Returns the shortest pre-training context of the longrope layers, None without any: see `Decoder`."""
        contexts = [rope.original_context for rope in self.ropes if rope is not None and rope.kind == "longrope"]
        return min(contexts) if contexts else None


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The names of the weights in a checkpoint: Llama's names unless the family differs.

    `qkv` and `gate_up` name either the separate projections, which are joined at load, or the one already joined.
    """

    root: str = "model."
    embedding: str = "embed_tokens"
    lm_head: str = "lm_head.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one of an MLP without a gate
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    recurrence: str = "linear_attn."  # before the names of a recurrent layer's weights
    expert: str = "mlp.experts.{index}."  # before the names of its projections
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked_experts: str = ""  # before the names of weights (experts, in, out)
    stacked_in_turn: bool = True  # their gates and ups (gpt-oss); else all gates come first (Llama 4)
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    selection_bias_rows: bool = False  # it is (1, experts) there
    shared_expert: str = "mlp.shared_experts."  # before the names of its projections
    shared_gate: str = "mlp.shared_expert_gate"
    expert_latents: tuple[str, str] = ("mixer.fc1_latent_proj", "mixer.fc2_latent_proj")  # to them, and back
    weight_scales: str = "router.per_expert_scale"
    router_norm: str = "router.scale"  # as the next three, of experts beside an MLP
    beside_pre_norm: str = "pre_feedforward_layernorm_2"
    beside_post_norm: str = "post_feedforward_layernorm_2"
    beside_mlp_post_norm: str = "post_feedforward_layernorm_1"  # of the MLP's output
    joined_experts: tuple[str, str] | None = None  # tensors (experts, out, in): gate above up, and down (Granite 4)
    sinks: str = "self_attn.sinks"
    norm: str = "norm"  # after the last layer
    attention_pre_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_pre_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    ignored: tuple[str, ...] = ()  # prefixes of tensors of other parts, such as a vision tower
    vision: str = "model.vision_model."  # before the names of the encoder's weights
    connector: str = "model.connector.modality_projection.proj"
