"""The whole Ling 3 decoder in float64, written from its equations: keys and values of every position written out."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from conformance import oracles
from conformance.decoder_oracle import Oracle, Trace, sigmoid, silu, unit
from conformance.profiles import Profile
from conformance.sessions import Session
from edge0_ref.contract import SigmoidGroup


class LingOracle(Oracle):
    """One checkpoint with its adapters."""

    def weight(self, module: str, index: int | None = None) -> np.ndarray:
        """Quantised, float, or put together from two stacks: row blocks of a head are W_UK, then W_UV."""
        if f"{module}.scales" in self.tensors:
            return super().weight(module, index)
        if f"{module}.weight" in self.tensors:
            return self.vector(f"{module}.weight")
        path = module.removesuffix("kv_b_proj")
        keys, values = self.vector(f"{path}embed_q.weight"), self.vector(f"{path}unembed_out.weight")
        return np.concatenate([part for head in range(len(keys)) for part in (keys[head].T, values[head])])

    def run(self, tokens: list[int], executed: Mapping[int, np.ndarray], stepped: Collection[int] = ()) -> Trace:
        """executed: layer -> experts [tokens, k]; stepped: positions that were decode steps, not prompt."""
        trace, table = Trace(), "model.word_embeddings"
        h = self.weight(table)[tokens]
        for layer in range(self.text["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            x = self.norm(h, self.vector(f"{path}.input_layernorm.weight"))
            latent = f"{path}.attention.dense.weight" in self.tensors
            h = h + (self.latent_attention if latent else self.kda)(x, f"{path}.attention")
            x = self.norm(h, self.vector(f"{path}.post_attention_layernorm.weight"))
            if f"{path}.mlp.gate.weight" not in self.tensors:
                h = h + self.mlp(x, f"{path}.mlp")
            else:
                h = h + self.experts(x, f"{path}.mlp", layer, executed[layer], stepped, trace)
                if layer in self.heads:
                    trace.prediction_logits[layer + 1] = self.predict(layer, x, executed[layer])
            trace.layer_output[layer] = h
        h = self.norm(h, self.vector("model.norm.weight"))
        trace.logits = self.linear(h, table if self.tied else "lm_head")
        return trace

    def kda(self, x: np.ndarray, path: str) -> np.ndarray:
        """One convolution each for q, k, v; every key channel decays at its own rate."""
        tokens, heads, size = len(x), self.text["num_attention_heads"], self.text["head_dim"]
        q, k, v = (self.convolved(x, path, name).reshape(tokens, heads, size) for name in ("q", "k", "v"))
        q, k = unit(q) / self.precision(np.sqrt(size)), unit(k)
        beta = sigmoid(self.linear(x, f"{path}.b_proj"))
        raw = (self.linear(x, f"{path}.f_proj") + self.vector(f"{path}.dt_bias")).reshape(tokens, heads, size)
        pace = np.exp(self.vector(f"{path}.A_log"))[:, None]
        decay = np.exp(self.precision(self.text["kda_lower_bound"]) * sigmoid(pace * raw))
        y = np.zeros_like(v)
        for head in range(heads):
            state = np.zeros((size, size), self.precision)
            for t in range(tokens):
                state = state @ np.diag(decay[t, head])
                delta = (v[t, head] - state @ k[t, head]) * beta[t, head]
                state = state + np.outer(delta, k[t, head])
                y[t, head] = state @ q[t, head]
        y = self.norm(y, self.vector(f"{path}.o_norm.weight")).reshape(tokens, -1)
        return self.linear(y * sigmoid(self.linear(x, f"{path}.g_proj")), f"{path}.o_proj")

    def convolved(self, x: np.ndarray, path: str, name: str) -> np.ndarray:
        raw, taps = self.linear(x, f"{path}.{name}_proj"), self.vector(f"{path}.{name}_conv1d.weight")[:, :, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, raw.shape[1]), self.precision), raw])
        return silu(sum(padded[j : j + len(x)] * taps[:, j] for j in range(taps.shape[1])))

    def latent_attention(self, x: np.ndarray, path: str) -> np.ndarray:
        text, tokens, heads = self.text, len(x), self.text["num_attention_heads"]
        plain, rotary, latent_size = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["kv_lora_rank"]
        low = self.norm(self.linear(x, f"{path}.q_a_proj"), self.vector(f"{path}.q_a_layernorm.weight"))
        q = self.linear(low, f"{path}.q_b_proj").reshape(tokens, heads, plain + rotary)
        both = self.linear(x, f"{path}.kv_a_proj_with_mqa")
        latent = self.norm(both[:, :latent_size], self.vector(f"{path}.kv_a_layernorm.weight"))
        kv = self.linear(latent, f"{path}.kv_b_proj").reshape(tokens, heads, plain + text["v_head_dim"])
        turned_q, turned_k = self.turned(q[:, :, plain:]), self.turned(both[:, None, latent_size:])[:, 0]
        gate, out = (
            sigmoid(self.linear(x, f"{path}.g_proj")),
            np.zeros((tokens, heads, text["v_head_dim"]), self.precision),
        )
        for t in range(tokens):
            for head in range(heads):
                k, v = kv[: t + 1, head, :plain], kv[: t + 1, head, plain:]
                scores = k @ q[t, head, :plain] + turned_k[: t + 1] @ turned_q[t, head]
                powers = np.exp((scores - scores.max()) / self.precision(np.sqrt(plain + rotary)))
                out[t, head] = (powers / powers.sum()) @ v * gate[t, head]
        return self.linear(out.reshape(tokens, -1), f"{path}.dense")

    def turned(self, x: np.ndarray) -> np.ndarray:
        """Neighbours (2i, 2i + 1) as complex numbers, turned by t * theta ** (-2i / size)."""
        size = x.shape[2]
        wide = x.astype(np.float64)
        numbers = wide[:, :, 0::2] + 1j * wide[:, :, 1::2]
        angles = np.arange(len(x))[:, None] * float(self.text["rope_theta"]) ** (-np.arange(0, size, 2) / size)
        numbers = numbers * np.exp(1j * angles)[:, None, :]
        return np.stack([numbers.real, numbers.imag], axis=-1).reshape(x.shape).astype(self.precision)

    def mlp(self, x: np.ndarray, path: str) -> np.ndarray:
        inner = silu(self.linear(x, f"{path}.gate_proj")) * self.linear(x, f"{path}.up_proj")
        return self.linear(inner, f"{path}.down_proj")

    def experts(
        self, x: np.ndarray, path: str, layer: int, executed: np.ndarray, stepped: Collection[int], trace: Trace
    ) -> np.ndarray:
        """Raw sigmoids of the chosen, renormalised and scaled; the shared expert has no gate."""
        trace.router_logits[layer] = self.linear(x, f"{path}.gate")
        y = self.mlp(x, f"{path}.shared_experts")
        place = "experts" if f"{path}.experts.gate_proj.weight" in self.tensors else "switch_mlp"
        parts = ("gate_proj", "up_proj", "down_proj")
        used = {int(e): [self.weight(f"{path}.{place}.{p}", int(e)) for p in parts] for e in np.unique(executed)}
        x = self.rounded(x)
        for t in range(len(x)):
            predicted = t in stepped and t > 0 and layer in trace.prediction_logits
            logits = trace.prediction_logits[layer][t - 1] if predicted else trace.router_logits[layer][t]
            scores = sigmoid(logits[executed[t]])
            weights = scores / (scores.sum() + 1e-20) * self.precision(self.text["routed_scaling_factor"])
            for expert, weight in zip(executed[t].tolist(), weights, strict=True):
                gate, up, down = used[expert]
                y[t] = y[t] + weight * (down @ self.rounded(silu(gate @ x[t]) * (up @ x[t])))
        return y

    def spec(self, layer: int, top_k: int, predicted: bool) -> SigmoidGroup:
        """How a layer chooses: with its bias from the router's logits, without it from a prediction."""
        bias = oracles.real(self.tensors[f"model.layers.{layer}.mlp.gate.expert_bias"]).astype(np.float32)
        groups = self.text["n_group"], self.text["topk_group"], self.text["routed_scaling_factor"]
        return SigmoidGroup(top_k, *groups, None if predicted else bias)


class LingSession(Session):
    """One script through one decoder under watch, and the float64 decoder beside it."""

    def oracle(self, precision: Any, profile: Profile) -> Trace:
        self.ling = LingOracle(self.folder, self.adapters.heads, self.adapters.loras, precision, profile)
        with np.errstate(over="ignore", under="ignore"):
            return self.ling.run(list(self.script.tokens), self.executed, self.script.stepped)

    def _judge_choices(self, truth: Trace, plain: Trace, what: str) -> None:
        """Router logits are right, and what was executed is what the observed logits choose, near ties aside."""
        for layer, executed in self.executed.items():
            consumer = layer in truth.prediction_logits
            predicted = {t for t in self.script.stepped if t > 0 and consumer}
            routed = [t for t in range(len(executed)) if t not in predicted]
            got = self.watch.rows(self.driven, "router_logits", layer) if routed else np.empty(0)
            if routed:
                wanted, other = truth.router_logits[layer][routed], plain.router_logits[layer][routed]
                self.judge.deep(got, wanted, other, f"router logits of layer {layer}, {what}")
            ahead = self.watch.rows(self.driven, "prediction_logits", layer) if consumer else np.empty(0)
            for t in range(len(executed)):
                row = ahead[t - 1] if t in predicted else got[routed.index(t)]
                spec = self.ling.spec(layer, executed.shape[1], t in predicted)
                choice = oracles.sigmoid_group_choice(row[None], spec)
                if choice.gap[0] > 16 * oracles.U:
                    found, right = executed[t].tolist(), choice.experts[0].tolist()
                    self.judge.state(found, right, f"experts of layer {layer} position {t}, {what}")
