"""Part of memory_math: a config.json of Hugging Face becomes a Model.

families.toml has a row for each model_type: what it implies, its own names of keys, its switches.
Every key of a config.json is read, known to change nothing, or named in the model's `notes`.
"""

from memory_math import Model, data, nearest

FAMILIES_FILE = data("families")
FAMILIES = FAMILIES_FILE["families"]
EXPERT_KEYS = {key for row in FAMILIES.values() for key in row.get("experts", [])}


class Config:
    """A config.json: what is read is checked, and remembered, so that no key passes in silence."""

    def __init__(self, config, name):
        self.name = name
        if not isinstance(config.get("text_config", {}), dict):
            raise self.refusal("text_config is not an object")
        config = {**config, **config.get("text_config", {})}
        model_type = config.get("model_type", "(no model_type)")
        self.family = nearest(model_type, FAMILIES, "model_type")
        self.row = FAMILIES[self.family]
        present = {key: value for key, value in config.items() if value is not None}
        self.config = self.row.get("defaults", {}) | present
        self.read = {"model_type", "text_config"}

    def refusal(self, why):
        return ValueError(f"config.json of {self.name}: {why}")

    def get(self, key, default=None):
        """The value of a key, under the family's own name of it."""
        key = self.row.get("names", {}).get(key, key)
        self.read.add(key)
        return self.config.get(key, default)

    def number(self, key, *default, least=1, most=10**8):
        """A whole number; without a default the key must be there."""
        name, value = self.row.get("names", {}).get(key, key), self.get(key, *default)
        if value is None:
            raise self.refusal(f"{name} is missing")
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(f"{name} is {value!r}, not a whole number from {least} to {most}")
        return value

    def flag(self, key):
        """True or false; false where the key is missing."""
        if type(value := self.get(key, False)) is not bool and value not in (0, 1):
            raise self.refusal(f"{key} is {value!r}, neither true nor false")
        return bool(value)

    def layer_numbers(self, key, layers):
        """A list of layers, or nothing."""
        numbers = self.get(key, [])
        if not isinstance(numbers, list) or not {*map(str, numbers)} <= {*map(str, range(layers))}:
            raise self.refusal(f"{key} is {numbers!r}, not a list of layers 0 to {layers - 1}")
        return numbers

    def notes(self):
        """Sentences on keys of parts that are not counted, and on keys that are not known."""
        uncounted = FAMILIES_FILE["not_counted"]
        said = [f"not counted: {words} ({key})" for key, words in uncounted.items()
                if self.config.get(key) and key not in self.read]  # fmt: skip
        head = next((x for x in self.config.get("architectures", []) if "CausalLM" not in x), "")
        if "Classification" in head or "Reward" in head:
            said.append(f"not counted: the head of {head}")
        known = self.read | {*uncounted, *FAMILIES_FILE["harmless"]}
        unknown = sorted(key for key, value in self.config.items() if value and key not in known)
        if unknown:
            said.append(f"not understood, and left out: {', '.join(unknown)}")
        return tuple(said)


def _expert_fields(config, layers, ffn):
    """The fields of a Model that say what its experts are, and which layers have none."""
    counted = next((key for key in config.row["experts"] if config.get(key)), None)
    experts = config.number(counted or config.row["experts"][0])
    top_k = config.number("num_experts_per_tok")
    if top_k > experts:
        raise config.refusal(f"num_experts_per_tok {top_k} exceeds {counted} {experts}")
    own_width = config.row["experts"][0] == "num_local_experts" and config.family != "qwen3_moe"
    width = config.number("moe_intermediate_size", *[ffn] * own_width)
    shared = config.number("n_shared_experts", 0, least=0) * width
    shared = config.number("shared_expert_intermediate_size", shared, least=0)
    first = config.number("first_k_dense_replace", 0, least=0)
    sparse, every = config.number("decoder_sparse_step", 1), config.number("moe_layer_freq", 1)
    step = config.number("interleave_moe_layer_step", 1)
    dense = config.layer_numbers("mlp_only_layers", layers)
    chosen = config.layer_numbers("moe_layers", layers)
    dense = {i for i in range(layers)
             if i < first or i % every or (i + 1) % sparse or (i + 1) % step or i in dense
             or chosen and i not in chosen}  # fmt: skip
    sizes = dict(experts=experts, top_k=top_k, expert_ffn=width, shared_ffn=shared)
    return sizes | dict(dense_layers=frozenset(dense))


def _window_fields(config, layers):
    """The fields of a Model that say how many tokens attention sees in each layer."""
    chunk = config.number("attention_chunk_size", 0, least=0)
    size = chunk or config.number("sliding_window", 0, least=0)
    kinds, rule = config.get("layer_types"), config.row.get("window")
    every = config.number("sliding_window_pattern", rule if type(rule) is int else 1)
    first, used = config.number("max_window_layers", 0, least=0), config.flag("use_sliding_window")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise config.refusal(f"layer_types is not a list of {layers} words")
    if kinds:
        unknown = {*kinds} - {"full_attention", "sliding_attention", "chunked_attention"}
        if unknown:
            raise config.refusal(f"layer_types has {min(unknown)}: no attention of a known kind")
        narrow = [kind != "full_attention" for kind in kinds]
    elif rule == "use_sliding_window":
        narrow = [used and i >= first for i in range(layers)]
    elif type(rule) is int:
        narrow = [(i + 1) % every > 0 for i in range(layers)]
    else:
        narrow = [rule == "all"] * layers
    windows = tuple(size * x for x in narrow)
    return dict(windows=windows if any(windows) else (), chunked=chunk > 0)


def model_from_config(config, name="model"):
    """A Model from a Hugging Face config.json, as a dict.

    Raises ValueError with a sentence that names the field which is missing or contradicts another.
    What is not counted (further-token layers, a vision tower) stands in the model's `notes`.
    """
    config = Config(config, name)
    family, number = config.family, config.number
    mla = family in ("deepseek_v2", "deepseek_v3", "kimi_k2")
    h, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads, layers = number("num_key_value_heads", heads), number("num_hidden_layers", most=10**4)
    of_heads = f"does not divide num_attention_heads {heads}"
    if config.get("head_dim") is None and not mla and h % heads:
        raise config.refusal(f"num_attention_heads {heads} does not divide hidden_size {h}")
    if heads % kv_heads:
        raise config.refusal(f"num_key_value_heads {kv_heads} {of_heads}")
    shape = dict(name=name, layers=layers, hidden=h, heads=heads, kv_heads=kv_heads)
    shape |= dict(head_dim=number("head_dim", h // heads), vocab=number("vocab_size"))
    shape |= dict(ffn=number("intermediate_size", *[4 * h] * (family == "gpt2")))
    shape |= dict(tied=config.flag("tie_word_embeddings"))
    for key, traits in config.row.get("switches", {}).items():
        shape |= dict.fromkeys(traits, config.flag(key))
    shape["qk_norm"] = config.row.get("qk_norm", "head") if shape.get("qk_norm") else ""
    if "positions" in config.row.get("names", {}):
        shape["positions"] = number("positions") + config.row.get("extra_positions", 0)
    if mla:
        sizes = map(number, ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        shape |= dict(mla=(number("q_lora_rank", 0, least=0), *sizes))
    plain = dict(word_embed_proj_dim=h, do_layer_norm_before=True)
    plain |= dict(layer_norm_elementwise_affine=True)
    for key, value in plain.items():
        if config.config.get(key, value) != value:
            raise config.refusal(f"{key} is {config.config[key]!r}: only {value} is known")
    experts = config.row.get("experts", [])
    for key in sorted(EXPERT_KEYS - {*experts}):
        if config.config.get(key):
            has = experts[0] if experts else "no experts"
            raise config.refusal(f"{key} is {config.config[key]!r}, and a {family} has {has}")
    if len({config.config[key] for key in experts if config.config.get(key)}) > 1:
        raise config.refusal(" and ".join(f"{key} is {config.config.get(key)}" for key in experts))
    if experts:
        shape |= _expert_fields(config, layers, shape["ffn"])
    shape |= _window_fields(config, layers) | config.row.get("traits", {})
    return Model(**shape, notes=config.notes())
