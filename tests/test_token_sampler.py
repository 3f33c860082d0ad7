"""The vectorised sampler: right distribution, right log-probabilities, rows that do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from april.engines.transformers.token_sampler import SamplingRows, nucleus, sample, uniforms

CPU = torch.device("cpu")


def _rows(temperature: list[float], top_p: list[float] | None = None) -> SamplingRows:
    return SamplingRows.of(np.array(temperature), np.array(top_p or [1.0] * len(temperature)), CPU)


def _uniform(seeds: list[int], position: int = 0) -> torch.Tensor:
    at = np.full(len(seeds), position, dtype=np.int64)
    return torch.from_numpy(uniforms(np.array(seeds, dtype=np.uint64), at, 1))


def test_uniform_numbers_depend_on_seed_and_position_only() -> None:
    """A stream is the same in whatever blocks it is asked for, and in whatever company."""
    seeds = np.array([0, 1, 2**63 - 1], dtype=np.uint64)
    whole = uniforms(seeds, np.zeros(3, dtype=np.int64), 40)
    alone = uniforms(seeds[1:2], np.array([17]), 5)

    np.testing.assert_array_equal(whole[1, 17:22], alone[0])
    assert len(np.unique(whole)) == whole.size


def test_draws_follow_the_distribution() -> None:
    """40,000 draws at temperature 0.7 match softmax(logits / 0.7) by a chi-square test (df 9, p = 1e-5: 39.3)."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(1)).expand(40_000, -1)
    tokens, logprobs = sample(logits, _rows([0.7] * 40_000), _uniform(list(range(40_000))))

    expected = (logits[0] / 0.7).softmax(-1).double() * 40_000
    chi_square = ((torch.bincount(tokens, minlength=10) - expected) ** 2 / expected).sum()
    assert chi_square < 39.3
    torch.testing.assert_close(logprobs, (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_a_row_does_not_see_the_others() -> None:
    """The same row alone and among 40 others with other parameters gives the same token and log-probability.

    Temperature 0 is the argmax with log_softmax(logits), whatever the other rows do.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(41, 200, generator=generator)
    temperature = [0.0, 0.5, 1.0, 1.5] * 10 + [0.8]
    top_p = [1.0, 0.9, 0.5] * 13 + [1.0, 0.7]
    seeds = list(range(41))
    together = sample(logits, _rows(temperature, top_p), _uniform(seeds, 3))

    for i in range(41):
        alone = sample(
            logits[i : i + 1], _rows(temperature[i : i + 1], top_p[i : i + 1]), _uniform(seeds[i : i + 1], 3)
        )
        assert alone[0][0] == together[0][i]
        assert alone[1][0] == together[1][i]
        whole = (logits[i] / (temperature[i] or 1.0)).log_softmax(-1)
        torch.testing.assert_close(together[1][i], whole[together[0][i]])
        assert temperature[i] or together[0][i] == logits[i].argmax()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_is_never_left(top_p: float) -> None:
    """Every draw is one of the fewest most likely tokens that hold top_p; the log-probability is not renormalised."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(4)) * 2
    tokens, logprobs = sample(logits.expand(5000, -1), _rows([1.0] * 5000, [top_p] * 5000), _uniform(list(range(5000))))

    probabilities, order = logits.double().softmax(-1).sort(descending=True)
    size = int((probabilities.cumsum(0) < top_p).sum()) + 1
    assert set(tokens.tolist()) <= set(order[:size].tolist())
    if size <= 3:
        assert set(tokens.tolist()) == set(order[:size].tolist())
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens])


def test_nucleus_keeps_the_lower_of_equal_tokens() -> None:
    """Ties at the edge are cut the same way each time: half of four equal tokens are the first two."""
    kept = nucleus(torch.full((1, 4), 0.25), torch.tensor([[0.5]], dtype=torch.float64))

    assert kept.tolist() == [[0.25, 0.25, 0.0, 0.0]]


def test_forbidden_tokens_are_not_drawn_even_if_they_hold_all_the_mass() -> None:
    """The rest is normalised again before it is drawn from; the log-probability stays that of the whole row."""
    logits = torch.zeros(400, 6)
    logits[:, 2] = 200.0  # exp(-200) is 0 in float32
    forbidden = torch.zeros(400, 6, dtype=torch.bool)
    forbidden[:, 2] = True
    for rows in (_rows([1.0] * 400), _rows([1.0] * 400, [0.9] * 400), _rows([0.0] * 400)):
        tokens, logprobs = sample(logits, rows, _uniform(list(range(400))), forbidden)

        assert 2 not in tokens.tolist()
        assert torch.equal(logprobs, torch.full((400,), -200.0))
    assert set(sample(logits, _rows([1.0] * 400), _uniform(list(range(400))), forbidden)[0].tolist()) == {0, 1, 3, 4, 5}


def test_extreme_uniforms_stay_inside_and_skip_empty_tokens() -> None:
    """The smallest and largest uniform numbers give the first and last token that has any probability."""
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, -torch.inf]]).expand(2, -1)
    edges = torch.tensor([[0.5 * 2.0**-52], [1 - 0.5 * 2.0**-52]], dtype=torch.float64)
    tokens, _ = sample(logits, _rows([1.0, 1.0]), edges)

    assert tokens.tolist() == [1, 2]


def test_nan_logits_give_a_valid_token_and_a_nan_logprob() -> None:
    """A broken row must not index outside the vocabulary; its log-probability says that it is broken."""
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(5))
    logits[0, 3] = torch.nan
    tokens, logprobs = sample(logits, _rows([1.0, 1.0]), _uniform([1, 2]))

    assert 0 <= int(tokens[0]) < 8
    assert torch.isnan(logprobs[0])
    assert torch.isfinite(logprobs[1])


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    """Log-probabilities are float32 whatever the logits are."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(6)).bfloat16()
    tokens, logprobs = sample(logits, _rows([1.0] * 4), _uniform([1, 2, 3, 4]))

    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0])
