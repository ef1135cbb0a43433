"""Mutants of chapters 1 and 2: codes, coefficients, sums; and of chapter 8, the update beside them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge0_ref import arithmetic, backend, bits, dequant, fast_shares, kernels, lora
from edge0_ref.contract import QuantizedMatrix
from edge0_ref.executors import exact
from tests.mutants.replacing import replace_everywhere


def changed_dequantize(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Dequantise a matrix that was changed first."""
    original = dequant.dequantize
    patch.setattr(backend, "dequantize", lambda matrix: original(change(matrix)))


def high_nibble_first(patch: pytest.MonkeyPatch) -> None:
    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        codes = bits.unpack_codes(matrix.packed, matrix.bits)
        swapped = codes.reshape(len(codes), -1, 2)[:, :, ::-1].reshape(codes.shape)
        return replace(matrix, packed=bits.pack_codes(np.ascontiguousarray(swapped), matrix.bits))

    changed_dequantize(patch, change)


def rows_of_a_view_counted_from_its_base(patch: pytest.MonkeyPatch) -> None:
    def codes(matrix: QuantizedMatrix) -> np.ndarray:
        base = matrix.packed if matrix.packed.base is None else matrix.packed.base
        return base.ravel()[: matrix.packed.size].reshape(matrix.packed.shape).view(np.uint8)

    patch.setattr(QuantizedMatrix, "codes", property(codes))


def scale_sign_dropped(patch: pytest.MonkeyPatch) -> None:
    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        return replace(matrix, scales=np.abs(bits.widen(matrix.scales)), biases=bits.widen(matrix.biases))

    changed_dequantize(patch, change)


def group_boundary_one_group_off(patch: pytest.MonkeyPatch) -> None:
    changed_dequantize(patch, lambda m: replace(m, scales=np.roll(m.scales, 1, 1), biases=np.roll(m.biases, 1, 1)))


def float16_scales_read_as_bfloat16(patch: pytest.MonkeyPatch) -> None:
    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        if matrix.scales.dtype != np.float16:
            return matrix
        return replace(matrix, scales=matrix.scales.view(np.uint16), biases=matrix.biases.view(np.uint16))

    changed_dequantize(patch, change)


def weights_pass_through_float16(patch: pytest.MonkeyPatch) -> None:
    original = dequant.dequantize
    patch.setattr(backend, "dequantize", lambda m: original(m).astype(np.float16).astype(np.float32))


def half_up_for_half_even(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dequant.np, "rint", lambda x: np.floor(x + np.float32(0.5)))


def codes_from_rounded_coefficients(patch: pytest.MonkeyPatch) -> None:
    original = dequant._coefficients

    def rounded(groups: Any, top_code: Any) -> Any:
        scales, biases = original(groups, top_code)
        return tuple(bits.widen(bits.narrow(values, np.dtype(np.float16))) for values in (scales, biases))

    patch.setattr(dequant, "_coefficients", rounded)


def smaller_end_represented_exactly(patch: pytest.MonkeyPatch) -> None:
    original = dequant._coefficients

    def mirrored(groups: Any, top_code: Any) -> Any:
        scales, biases = original(-groups, top_code)
        return -scales, -biases + np.float32(0) * scales

    patch.setattr(dequant, "_coefficients", lambda groups, top: mirrored(groups[..., ::-1] - groups.mean(), top))


def coefficients_truncated(patch: pytest.MonkeyPatch) -> None:
    def cut(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        if dtype == np.uint16:
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits.narrow(values, dtype)

    patch.setattr(dequant, "narrow", cut)


def nan_sets_the_range(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dequant.np, "fmax", np.maximum)


def ragged_groups_accepted(patch: pytest.MonkeyPatch) -> None:
    original = dequant.quantize

    def whole_groups_only(values: np.ndarray, width: int, group_size: int) -> QuantizedMatrix:
        cols = values.shape[1] // group_size * group_size
        return original(values[:, :cols], width, group_size)

    patch.setattr(backend, "quantize", whole_groups_only)


def activations_rounded_to_bfloat16(patch: pytest.MonkeyPatch) -> None:
    original = lora._multiply
    patch.setattr(lora, "_multiply", lambda x, w: original(bits.widen(bits.float32_to_bfloat16(x)), w))


def extra_columns_ignored(patch: pytest.MonkeyPatch) -> None:
    original = lora.linear

    def lenient(x: np.ndarray, weight: Any, update: Any = None) -> np.ndarray:
        cols = weight.cols if isinstance(weight, QuantizedMatrix) else weight.shape[1]
        padded = np.pad(x, ((0, 0), (0, max(0, cols - x.shape[1]))))
        return original(np.ascontiguousarray(padded[:, :cols]), weight, update)

    patch.setattr(backend, "linear", lenient)


def sum_from_left_to_right(patch: pytest.MonkeyPatch) -> None:
    def plain(x: np.ndarray, weight: np.ndarray, y: np.ndarray) -> None:
        for t in range(len(x)):
            for r in range(len(weight)):
                y[t, r] = sum((x[t].astype(np.float64) * weight[r].astype(np.float64)).tolist())

    patch.setattr(kernels, "linear_float32", plain)


def sums_in_float32(patch: pytest.MonkeyPatch) -> None:
    def narrow_sum(x: np.ndarray, weight: np.ndarray, y: np.ndarray) -> None:
        y[:] = x @ weight.T

    patch.setattr(kernels, "linear_float32", narrow_sum)


def sums_in_float16(patch: pytest.MonkeyPatch) -> None:
    def half(x: np.ndarray, weight: np.ndarray, y: np.ndarray) -> None:
        y[:] = np.cumsum((x[:, None] * weight[None]).astype(np.float16), axis=-1, dtype=np.float16)[..., -1]

    patch.setattr(kernels, "linear_float32", half)


def more_tokens_take_a_faster_way(patch: pytest.MonkeyPatch) -> None:
    original = kernels.linear_quantized

    def faster(x: np.ndarray, codes: Any, scales: Any, biases: Any, width: int, y: np.ndarray) -> None:
        original(x, codes, scales, biases, width, y)
        if len(x) > 1:
            y[:] = np.nextafter(y, np.float32(0))

    patch.setattr(kernels, "linear_quantized", faster)


def update_without_its_scale(patch: pytest.MonkeyPatch) -> None:
    original = lora.linear

    def unscaled(x: Any, weight: Any, update: Any = None) -> Any:
        return original(x, weight, update and replace(update, scale=1.0))

    patch.setattr(backend, "linear", unscaled)
    patch.setattr(arithmetic, "linear", unscaled)


def update_merged_into_int4(patch: pytest.MonkeyPatch) -> None:
    original = lora.linear

    def merged(x: Any, weight: Any, update: Any = None) -> Any:
        if update is not None and isinstance(weight, QuantizedMatrix):
            whole = dequant.dequantize(weight) + np.float32(update.scale) * (update.up @ update.down)
            weight, update = dequant.quantize(whole.astype(np.float32), weight.bits, weight.group_size), None
        return original(x, weight, update)

    patch.setattr(backend, "linear", merged)


def update_of_zeros_that_still_rounds(patch: pytest.MonkeyPatch) -> None:
    original = lora.linear

    def rounding(x: Any, weight: Any, update: Any = None) -> Any:
        y = original(x, weight, update)
        return y if update is None else y.astype(np.float16).astype(np.float32)

    patch.setattr(backend, "linear", rounding)


def a_matrix_goes_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QuantizedMatrix, "__post_init__", lambda matrix: None)


def own_dtype_rounded_once(patch: pytest.MonkeyPatch) -> None:
    def dequantize_as(matrix: QuantizedMatrix) -> Any:
        return bits.narrow(dequant.dequantize(matrix), matrix.scales.dtype)

    replace_everywhere(patch, dequant.dequantize_as, dequantize_as)


def update_factors_swapped(patch: pytest.MonkeyPatch) -> None:
    original = lora.linear

    def swapped(x: Any, weight: Any, update: Any = None) -> Any:
        if update is not None and update.down.shape[1] == update.up.shape[0]:
            down, up = np.ascontiguousarray(update.up.T), np.ascontiguousarray(update.down.T)
            update = replace(update, down=down, up=up)
        return original(x, weight, update)

    patch.setattr(backend, "linear", swapped)
    patch.setattr(arithmetic, "linear", swapped)


def an_update_on_routed_experts(patch: pytest.MonkeyPatch) -> None:
    original = exact.run_expert

    def run(x: np.ndarray, expert: Any) -> np.ndarray:
        y = original(x, expert)
        return y + np.float32(2.0**-12) * np.roll(y, 1, axis=1)

    patch.setattr(exact, "run_expert", run)


def a_threads_part_begins_a_task_early(patch: pytest.MonkeyPatch) -> None:
    original = fast_shares.share

    def share(tasks: int, threads: int) -> Any:
        untaken = original(tasks, threads)
        untaken[fast_shares.LINE :: fast_shares.LINE] -= 1
        return untaken

    patch.setattr(fast_shares, "share", share)


def a_thread_that_is_done_helps_only_the_next(patch: pytest.MonkeyPatch) -> None:
    line = fast_shares.LINE

    def take_task(untaken: Any, thread: int, tasks: int) -> int:
        threads = len(untaken) // line
        for part in (thread, (thread + 1) % threads):
            task = fast_shares.add_one(untaken, part * line)
            if task < (part + 1) * tasks // threads:
                return int(task)
        return -1

    patch.setattr(fast_shares, "take_task", take_task)


MUTANTS = {
    a_matrix_goes_unchecked: "DEQ-001",
    own_dtype_rounded_once: "DEQ-004",
    high_nibble_first: "DEQ-003",
    rows_of_a_view_counted_from_its_base: "DEQ-003",
    scale_sign_dropped: "DEQ-005",
    group_boundary_one_group_off: "DEQ-006",
    float16_scales_read_as_bfloat16: "NUM-004",
    weights_pass_through_float16: "DEQ-002",
    half_up_for_half_even: "DEQ-020",
    codes_from_rounded_coefficients: "DEQ-020",
    smaller_end_represented_exactly: "DEQ-021",
    coefficients_truncated: "DEQ-022",
    nan_sets_the_range: "DEQ-023",
    ragged_groups_accepted: "DEQ-024",
    activations_rounded_to_bfloat16: "DEQ-010",
    a_threads_part_begins_a_task_early: "DEQ-010",
    a_thread_that_is_done_helps_only_the_next: "DEQ-010",
    extra_columns_ignored: "DEQ-011",
    sum_from_left_to_right: "NUM-002",
    sums_in_float32: "NUM-001",
    sums_in_float16: "NUM-005",
    more_tokens_take_a_faster_way: "NUM-010",
    update_without_its_scale: "LOR-001",
    update_merged_into_int4: "LOR-001",
    update_factors_swapped: "LOR-001",
    an_update_on_routed_experts: "EXE-003",
    update_of_zeros_that_still_rounds: "LOR-007",
}
