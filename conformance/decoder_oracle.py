"""The whole Qwen3.5-MoE decoder in float64, written from its equations and reading the files by itself.

It has no state, no cache and no executor: every run computes all positions of a sequence from nothing. It does not
choose experts but is told which were executed, because a near tie may fall either way; what it returns lets the
caller check that choice. In `precision=float32` it is the yardstick: what plain float32 makes of the same equations,
with activations rounded on their way into every linear layer if the profile says so.
"""

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance import oracles
from conformance.profiles import FLOAT32, Profile
from edge0_ref.contract import Lora, PrerouterHead, QuantizedMatrix

FORMATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}


@dataclass
class Trace:
    """Everything worth comparing: logits [tokens, vocab]; by layer: outputs, router and prediction logits."""

    logits: np.ndarray = field(default_factory=lambda: np.empty(0))
    layer_output: dict[int, np.ndarray] = field(default_factory=dict)
    router_logits: dict[int, np.ndarray] = field(default_factory=dict)
    prediction_logits: dict[int, np.ndarray] = field(default_factory=dict)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of every shard."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(raw[first:last], FORMATS[entry["dtype"]]).reshape(entry["shape"])
    return found


class Oracle:
    """One checkpoint with its adapters. The config is a family's own, or has the text model's part in `text_config`."""

    def __init__(
        self,
        folder: Path,
        heads: Mapping[int, PrerouterHead],
        loras: Mapping[str, Lora],
        precision: Any = np.float64,
        profile: Profile = FLOAT32,
    ) -> None:
        self.tensors, self.heads, self.loras = read_tensors(folder), heads, loras
        self.precision, self.profile = precision, profile
        config = json.loads((folder / "config.json").read_text("utf-8"))
        self.text, self.quantization = config.get("text_config", config), config["quantization"]
        self.tied, self.eps = config["tie_word_embeddings"], self.text["rms_norm_eps"]

    def weight(self, module: str, index: int | None = None) -> np.ndarray:
        packed, scales, biases = (self.tensors[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
        if index is not None:
            packed, scales, biases = packed[index], scales[index], biases[index]
        bits = self.quantization.get(module, self.quantization)["bits"]
        group_size = self.quantization.get(module, self.quantization)["group_size"]
        return oracles.dense(QuantizedMatrix(packed, scales, biases, bits, group_size))[0].astype(self.precision)

    def vector(self, name: str) -> np.ndarray:
        return oracles.real(self.tensors[name]).astype(self.precision)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return oracles.rounded(x, self.profile)

    def linear(self, x: np.ndarray, module: str) -> np.ndarray:
        x = self.rounded(x)
        y = x @ self.weight(module).T
        if module in self.loras:
            lora = self.loras[module]
            down, up = lora.down.astype(self.precision), lora.up.astype(self.precision)
            y = y + self.precision(lora.scale) * (self.rounded(x @ down.T) @ up.T)
        return y

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.precision(self.eps)) * weight

    def run(self, tokens: list[int], executed: Mapping[int, np.ndarray], stepped: Collection[int] = ()) -> Trace:
        """executed: layer -> experts [tokens, k]; stepped: positions that were decode steps, not prompt."""
        trace, prefix = Trace(), "language_model."
        table = f"{prefix}model.embed_tokens"
        h = self.weight(table)[tokens]
        for layer in range(self.text["num_hidden_layers"]):
            path = f"{prefix}model.layers.{layer}"
            x = self.norm(h, self.vector(f"{path}.input_layernorm.weight"))
            full = self.text["layer_types"][layer] == "full_attention"
            h = h + (self.attention(x, f"{path}.self_attn") if full else self.delta_net(x, f"{path}.linear_attn"))
            x = self.norm(h, self.vector(f"{path}.post_attention_layernorm.weight"))
            h = h + self.experts(x, f"{path}.mlp", layer, executed[layer], stepped, trace)
            if layer in self.heads:
                trace.prediction_logits[layer + 1] = self.predict(layer, x, executed[layer])
            trace.layer_output[layer] = h
        h = self.norm(h, self.vector(f"{prefix}model.norm.weight"))
        trace.logits = self.linear(h, table if self.tied else f"{prefix}lm_head")
        return trace

    def attention(self, x: np.ndarray, path: str) -> np.ndarray:
        """q_proj gives, head after head, [query | gate]; pairs (i, i + half) of the first dims are rotated."""
        heads, size, tokens = self.text["num_attention_heads"], self.text["head_dim"], len(x)
        both = self.linear(x, f"{path}.q_proj").reshape(tokens, heads, 2 * size)
        q, gate = both[:, :, :size], both[:, :, size:]
        k = self.linear(x, f"{path}.k_proj").reshape(tokens, -1, size)
        v = self.linear(x, f"{path}.v_proj").reshape(tokens, -1, size)
        q = self.rotate(self.norm(q, self.vector(f"{path}.q_norm.weight")))
        k = self.rotate(self.norm(k, self.vector(f"{path}.k_norm.weight")))
        out = np.zeros_like(q)
        for t in range(tokens):
            for head in range(heads):
                shared = head // (heads // k.shape[1])
                scores = k[: t + 1, shared] @ q[t, head] / self.precision(np.sqrt(size))
                powers = np.exp(scores - scores.max())
                out[t, head] = (powers / powers.sum()) @ v[: t + 1, shared]
        return self.linear((out * sigmoid(gate)).reshape(tokens, -1), f"{path}.o_proj")

    def rotate(self, x: np.ndarray) -> np.ndarray:
        rope = self.text["rope_parameters"]
        half = int(x.shape[2] * rope["partial_rotary_factor"]) // 2
        turned = x.copy()
        for t in range(len(x)):
            for i in range(half):
                angle = t * rope["rope_theta"] ** (-i / half)
                cos, sin = self.precision(np.cos(angle)), self.precision(np.sin(angle))
                turned[t, :, i] = x[t, :, i] * cos - x[t, :, i + half] * sin
                turned[t, :, i + half] = x[t, :, i + half] * cos + x[t, :, i] * sin
        return turned

    def delta_net(self, x: np.ndarray, path: str) -> np.ndarray:
        text, tokens = self.text, len(x)
        key_heads, key_size = text["linear_num_key_heads"], text["linear_key_head_dim"]
        heads, size = text["linear_num_value_heads"], text["linear_value_head_dim"]
        raw = self.linear(x, f"{path}.in_proj_qkv")
        taps = self.vector(f"{path}.conv1d.weight")[:, :, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, raw.shape[1]), self.precision), raw])
        mixed = silu(sum(padded[j : j + tokens] * taps[:, j] for j in range(taps.shape[1])))
        q = mixed[:, : key_heads * key_size].reshape(tokens, key_heads, key_size)
        k = mixed[:, key_heads * key_size : 2 * key_heads * key_size].reshape(tokens, key_heads, key_size)
        v = mixed[:, 2 * key_heads * key_size :].reshape(tokens, heads, size)
        q = unit(q) / self.precision(np.sqrt(key_size))
        k = unit(k)
        beta = sigmoid(self.linear(x, f"{path}.in_proj_b"))
        pace = np.logaddexp(0, self.linear(x, f"{path}.in_proj_a") + self.vector(f"{path}.dt_bias"))
        decay = np.exp(-np.exp(self.vector(f"{path}.A_log")) * pace)
        y = np.zeros_like(v)
        for head in range(heads):
            state, key_head = np.zeros((size, key_size), self.precision), head // (heads // key_heads)
            for t in range(tokens):
                state = state * decay[t, head]
                delta = (v[t, head] - state @ k[t, key_head]) * beta[t, head]
                state = state + np.outer(delta, k[t, key_head])
                y[t, head] = state @ q[t, key_head]
        y = self.norm(y, self.vector(f"{path}.norm.weight")).reshape(tokens, -1)
        return self.linear(y * silu(self.linear(x, f"{path}.in_proj_z")), f"{path}.out_proj")

    def experts(
        self, x: np.ndarray, path: str, layer: int, executed: np.ndarray, stepped: Collection[int], trace: Trace
    ) -> np.ndarray:
        """Weights come from the router, at a step of a consumer from the prediction of the position before."""
        trace.router_logits[layer] = self.linear(x, f"{path}.gate")
        shared = sigmoid(self.linear(x, f"{path}.shared_expert_gate"))
        gate, up, down = (f"{path}.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
        y = shared * self.linear(silu(self.linear(x, gate)) * self.linear(x, up), down)
        parts = [f"{path}.switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
        used = {int(e): [self.weight(part, int(e)) for part in parts] for e in np.unique(executed)}
        x = self.rounded(x)
        for t in range(len(x)):
            predicted = t in stepped and t > 0 and layer in trace.prediction_logits
            logits = trace.prediction_logits[layer][t - 1] if predicted else trace.router_logits[layer][t]
            chosen = logits[executed[t]]
            weights = np.exp(chosen - chosen.max())
            for expert, weight in zip(executed[t].tolist(), weights / weights.sum(), strict=True):
                opens, lifts, lowers = used[expert]
                y[t] = y[t] + weight * (lowers @ self.rounded(silu(opens @ x[t]) * (lifts @ x[t])))
        return y

    def predict(self, layer: int, x: np.ndarray, executed: np.ndarray) -> np.ndarray:
        """[x | experts of this position | experts of the position before], through the layer's head."""
        experts, features = self.text["num_experts"], []
        for t in range(len(x)):
            now, before = np.zeros(experts), np.zeros(experts)
            now[executed[t]] = 1
            if t > 0:
                before[executed[t - 1]] = 1
            features.append(np.concatenate([x[t], now, before]))
        f, head = self.rounded(np.array(features, self.precision)), self.heads[layer]
        fc1, fc2, direct = (part.astype(self.precision) for part in (head.fc1, head.fc2, head.linear))
        return f @ direct.T + self.rounded(oracles.gelu(f @ fc1.T).astype(self.precision)) @ fc2.T


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def silu(z: np.ndarray) -> np.ndarray:
    return z * sigmoid(z)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + x.dtype.type(1e-6))
