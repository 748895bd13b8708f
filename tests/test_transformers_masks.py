"""The transformers adapter: what its masks become, and what single rows mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import softlookup as sl

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import softlookup.transformers as adapter
from softlookup._transformers import masks
from tiny_models import WINDOW, build, logits, padding, tokens


class TestPlan:
    """What the mask becomes: nothing N x M where a window or lengths say it."""

    def plan(self, queries: int, keys: int, **keywords: Any) -> Any:
        return masks.plan_mask(2, queries, keys, **keywords)

    def test_causal_and_decoding(self) -> None:
        assert isinstance(self.plan(7, 7).mask, sl.Causal)
        assert self.plan(1, 8, q_offset=7).mask is None

    @pytest.mark.parametrize("queries", [WINDOW - 1, WINDOW, WINDOW + 1])
    def test_causal_window_is_w_minus_1_to_the_left(self, queries: int) -> None:
        function = transformers.masking_utils.sliding_window_causal_mask_function(WINDOW)
        mask = self.plan(queries, queries, mask_function=function).mask
        expected = sl.Causal() if queries <= WINDOW else sl.Window(WINDOW - 1, 0)
        assert type(mask) is type(expected)
        stock = transformers.masking_utils.sdpa_mask(
            1, queries, queries, mask_function=function, allow_is_causal_skip=False
        )
        assert np.array_equal(mask.dense(1, 1, queries, queries, 0, 0), stock.numpy())

    @pytest.mark.parametrize("keys", [WINDOW, WINDOW + 1, WINDOW + 2])
    def test_bidirectional_window_is_w_both_ways(self, keys: int) -> None:
        function = transformers.masking_utils.sliding_window_bidirectional_mask_function(WINDOW)
        mask = self.plan(keys, keys, mask_function=function).mask
        assert (mask is None) == (keys <= WINDOW + 1)
        if mask is not None:
            assert mask.dense(1, 1, keys, keys, 0, 0)[0, 0, 0].sum() == WINDOW + 1

    def test_full_window_cache_needs_no_mask_to_decode(self) -> None:
        function = transformers.masking_utils.sliding_window_causal_mask_function(WINDOW)
        plan = self.plan(1, WINDOW, q_offset=20, kv_offset=20 - WINDOW + 1, mask_function=function)
        assert plan.mask is None
        assert (plan.q_start, plan.k_start) == (20, 20 - WINDOW + 1)

    def test_static_cache_is_cut_and_its_live_offset_copied(self) -> None:
        offset = torch.tensor(4)
        plan = self.plan(2, 64, q_offset=offset)
        offset.add_(2)
        assert (plan.q_start, plan.visible_keys) == (4, 6)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_becomes_lengths(self, side: str) -> None:
        real = padding((9, 4), side).bool()
        full = transformers.masking_utils.bidirectional_mask_function
        mask = self.plan(9, 9, attention_mask=real, mask_function=full).mask
        assert isinstance(mask, sl.Lengths)
        assert np.array_equal(mask.dense(2, 1, 9, 9, 0, 0)[:, 0, 0], real.numpy())

    def test_a_hole_is_written_out_without_queries(self) -> None:
        real = torch.tensor([[True, False, True, True], [True, True, True, True]])
        full = transformers.masking_utils.bidirectional_mask_function
        assert isinstance(self.plan(4, 4, attention_mask=real, mask_function=full).mask, sl.Dense)

    def test_chunks_that_do_not_bite_are_plain_causal(self) -> None:
        function = transformers.masking_utils.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long))
        assert isinstance(self.plan(8, 8, mask_function=function).mask, sl.Causal)
        assert not isinstance(self.plan(9, 9, mask_function=function).mask, sl.Causal)

    @pytest.mark.parametrize("limit", [0, masks.DENSE_ELEMENTS_MAX])
    def test_unknown_closures_written_out_or_evaluated_by_tile(
        self, limit: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(masks, "DENSE_ELEMENTS_MAX", limit)
        group = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])
        function = transformers.masking_utils.or_masks(
            transformers.masking_utils.causal_mask_function, lambda b, h, i, j: group[b, i] == group[b, j]
        )
        mask = self.plan(6, 6, mask_function=function).mask
        assert isinstance(mask, sl.Dense if limit else sl.Predicate)
        stock = transformers.masking_utils.sdpa_mask(2, 6, 6, mask_function=function, allow_is_causal_skip=False)
        generator = np.random.default_rng(0)
        q, k, v = (generator.standard_normal((2, 1, 6, 4), dtype=np.float32) for _ in range(3))
        ours = sl.attention(q, k, v, mask=mask, q_start=0)
        assert np.abs(ours - sl.attention(q, k, v, mask=stock.numpy())).max() < 1e-6

    def test_user_function_that_needs_vmap(self) -> None:
        function = transformers.masking_utils.and_masks(
            transformers.masking_utils.causal_mask_function, lambda b, h, i, j: torch.stack([i, j]).sum() % 2 == 0
        )
        mask = self.plan(4, 4, mask_function=function, use_vmap=True).mask
        assert np.array_equal(mask.dense(1, 1, 4, 4, 0, 0)[0, 0].sum(-1), [1, 1, 2, 2])

    def test_a_plan_is_returned_unchanged(self) -> None:
        plan = self.plan(3, 3)
        assert plan.ndim == 4
        assert plan.shape == (2, 1, 3, 3)
        assert self.plan(3, 3, attention_mask=plan) is plan

    def test_a_model_that_edits_its_mask_is_told(self) -> None:
        with pytest.raises(AttributeError, match="edits its mask as a tensor"):
            self.plan(3, 3).masked_fill(1, 0)


class TestRows:
    def test_rows_of_left_padding_are_zero(self) -> None:
        real = padding((6, 4), "left").bool()
        plan = masks.plan_mask(2, 6, 6, attention_mask=real)
        query, key = torch.randn(2, 2, 6, 8), torch.randn(2, 1, 6, 8)
        out, weights = adapter._attention_forward(torch.nn.Module(), query, key, key, plan)
        assert weights is None
        assert out.is_contiguous()
        assert out.shape == (2, 6, 2, 8)
        assert torch.equal(out[1, :2], torch.zeros(2, 2, 8))
        alone, _ = adapter._attention_forward(
            torch.nn.Module(), query[1:, :, 2:], key[1:, :, 2:], key[1:, :, 2:], masks.plan_mask(1, 4, 4)
        )
        assert float((out[1, 2:] - alone[0]).abs().max()) < 1e-6

    def test_keyword_window_without_a_mask(self) -> None:
        query = torch.randn(1, 1, 9, 8)
        for causal, right in ((True, 0), (False, WINDOW - 1)):
            out, _ = adapter._attention_forward(
                torch.nn.Module(), query, query, query, None, sliding_window=WINDOW, is_causal=causal
            )
            x = query.numpy()
            expected = sl.attention(x, x, x, mask=sl.Window(WINDOW - 1, right), q_start=0)
            assert np.array_equal(out.numpy().swapaxes(1, 2), expected)

    def test_observer_sees_every_layer(self) -> None:
        model, seen = build("llama"), []
        with adapter.observe(lambda module, stats: seen.append((module.layer_idx, stats.entropy.shape))):
            logits(model, "softlookup", tokens(1, 7))
        logits(model, "softlookup", tokens(1, 7))
        assert seen == [(0, (1, 4, 7)), (1, (1, 4, 7))]
