"""Random checkpoints of the Ling 3 family, in the two layouts that converters write."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from conformance import cases
from conformance.checkpoints import VOCAB, WORDS, CheckpointRecipe, Tensor

HEADS, HEAD_SIZE, KEY_SIZE, ROTARY_SIZE, VALUE_SIZE, RANK, LATENT = 2, 32, 16, 8, 32, 32, 64
NUM_GROUPS, TOP_GROUPS = 4, 2
Layout = Literal["one file", "stacks"]
FLOATS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "b_proj", "word_embeddings", "lm_head")


@dataclass(frozen=True)
class LingRecipe(CheckpointRecipe):
    """A model of "kda" and "mla" layers whose last `group` layers end in "mla"; its first `dense` have no experts.

    layout: "one file" quantises everything but the router and keeps experts in `mlp.experts`; "stacks" has kv_b as
    two stacks of heads, floats for low ranks and vocabulary, experts in `mlp.switch_mlp`.
    """

    group: int = 2
    dense: int = 1
    layout: Layout = "one file"

    def modules(self) -> dict[str, tuple[int, int]]:
        hidden, wide, found = self.width, HEADS * HEAD_SIZE, dict[str, tuple[int, int]]()
        for number, kind in enumerate(self.layers):
            path = f"model.layers.{number}"
            if kind == "kda":
                found |= {f"{path}.attention.{name}_proj": (wide, hidden) for name in ("q", "k", "v", "f", "g")}
                found |= {f"{path}.attention.b_proj": (HEADS, hidden), f"{path}.attention.o_proj": (hidden, wide)}
            else:
                shapes = {"q_a_proj": (RANK, hidden), "q_b_proj": (HEADS * (KEY_SIZE + ROTARY_SIZE), RANK)}
                shapes |= {"kv_a_proj_with_mqa": (LATENT + ROTARY_SIZE, hidden), "g_proj": (HEADS, hidden)}
                shapes |= {"kv_b_proj": (HEADS * (KEY_SIZE + VALUE_SIZE), LATENT)}
                shapes |= {"dense": (hidden, HEADS * VALUE_SIZE)}
                found |= {f"{path}.attention.{name}": shape for name, shape in shapes.items()}
            if number >= self.dense:
                found[f"{path}.mlp.gate"] = (self.experts, hidden)
            mlp = f"{path}.mlp" + (".shared_experts" if number >= self.dense else "")
            found |= {f"{mlp}.{name}_proj": (hidden, hidden) for name in ("gate", "up", "down")}
        return found

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
            "hidden_size": self.width, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "tie_word_embeddings": self.tied,
            "num_hidden_layers": len(self.layers), "layer_group_size": self.group, "first_k_dense_replace": self.dense,
            "num_attention_heads": HEADS, "head_dim": HEAD_SIZE, "short_conv_kernel_size": 4,
            "kda_lower_bound": -5.0, "kda_safe_gate": True, "no_kda_lora": True,
            "q_lora_rank": RANK, "kv_lora_rank": LATENT, "qk_nope_head_dim": KEY_SIZE, "v_head_dim": VALUE_SIZE,
            "qk_rope_head_dim": ROTARY_SIZE, "rope_theta": 100.0, "rope_interleave": True, "rope_scaling": None,
            "num_experts": self.experts, "num_experts_per_tok": self.top_k, "num_shared_experts": 1,
            "n_group": NUM_GROUPS, "topk_group": TOP_GROUPS, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "intermediate_size": self.width, "moe_intermediate_size": self.width,
            "moe_shared_expert_intermediate_size": self.width, "max_position_embeddings": 512,
            "quantization": {"group_size": self.group_size, "bits": 4, "mode": "affine"},
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        random, hidden, wide = np.random.default_rng(self.seed), self.width, HEADS * HEAD_SIZE
        found: dict[str, Tensor] = {}

        def vector(name: str, values: np.ndarray) -> None:
            found[name] = WORDS[self.coefficient], cases.narrowed(values.astype(np.float32), self.coefficient)

        def linear(module: str, rows: int, cols: int, stack: int = 0) -> None:
            floats = module.endswith(".gate") or (self.layout == "stacks" and module.split(".")[-1] in FLOATS)
            if floats:
                vector(f"{module}.weight", random.standard_normal((rows, cols)) * cols**-0.5)
                return
            form = (cols, 4, self.group_size, self.coefficient, "mixed", int(random.integers(2**32)), 1.7 * cols**-0.5)
            matrix = cases.MatrixRecipe(max(stack, 1) * rows, *form).build()
            leading = (stack, rows) if stack else (rows,)
            for part, values in (("weight", matrix.packed), ("scales", matrix.scales), ("biases", matrix.biases)):
                found[f"{module}.{part}"] = (
                    "U32" if part == "weight" else WORDS[self.coefficient],
                    values.reshape(*leading, -1),
                )

        for module, (rows, cols) in self.modules().items():
            if module.endswith("kv_b_proj") and self.layout == "stacks":
                path = module.removesuffix("kv_b_proj")
                vector(f"{path}embed_q.weight", random.standard_normal((HEADS, LATENT, KEY_SIZE)) * LATENT**-0.5)
                vector(f"{path}unembed_out.weight", random.standard_normal((HEADS, VALUE_SIZE, LATENT)) * LATENT**-0.5)
            else:
                linear(module, rows, cols)
        for module in ["model.word_embeddings"] + ([] if self.tied else ["lm_head"]):
            linear(module, VOCAB, hidden)
        norms = {"model.norm": hidden}
        for number, kind in enumerate(self.layers):
            path = f"model.layers.{number}"
            norms |= {f"{path}.input_layernorm": hidden, f"{path}.post_attention_layernorm": hidden}
            if kind == "kda":
                norms[f"{path}.attention.o_norm"] = HEAD_SIZE
                vector(f"{path}.attention.A_log", random.uniform(-1, 1, HEADS))
                vector(f"{path}.attention.dt_bias", random.uniform(-2, 1, wide))
                for name in ("q", "k", "v"):
                    vector(f"{path}.attention.{name}_conv1d.weight", random.standard_normal((wide, 4, 1)) * 0.5)
            else:
                norms |= {f"{path}.attention.q_a_layernorm": RANK, f"{path}.attention.kv_a_layernorm": LATENT}
            if number >= self.dense:
                vector(f"{path}.mlp.gate.expert_bias", random.standard_normal(self.experts) * 0.3)
                place = "experts" if self.layout == "one file" else "switch_mlp"
                for name in ("gate_proj", "up_proj", "down_proj"):
                    linear(f"{path}.mlp.{place}.{name}", hidden, hidden, stack=self.experts)
        for name, size in norms.items():
            vector(f"{name}.weight", random.uniform(0.5, 1.5, size))
        return found


KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "mla": (("mla", "mla"), 1),
    "both": (("kda", "mla"), 2),
    "tail": (("kda", "mla", "mla"), 2),
    "kda": (("kda", "kda", "kda", "mla"), 4),
}


@st.composite
def ling_checkpoints(draw: Any, kinds: tuple[str, ...] = tuple(KINDS)) -> LingRecipe:
    layers, group = KINDS[draw(st.sampled_from(kinds))]
    experts = draw(st.sampled_from((4, 8)))
    return LingRecipe(
        layers=layers,
        group=group,
        experts=experts,
        top_k=draw(st.sampled_from(sorted({1, experts // NUM_GROUPS * TOP_GROUPS}))),
        coefficient=draw(cases.COEFFICIENTS),
        shards=draw(st.sampled_from((1, 3))),
        tied=draw(st.booleans()),
        seed=draw(cases.SEEDS),
        dense=draw(st.sampled_from((0, 1))),
        layout=draw(st.sampled_from(("one file", "stacks"))),
    )
