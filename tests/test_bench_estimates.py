"""The benchmark of estimates: its peers implement their formulas, and the record becomes a page."""

import torch

from approx_kernels.ops.performer.api import draw_projection, performer_attention
from bench.estimates import BUCKETS, EPS, captured, captured_by_reformer, errors, hashing, made, report, with_eps


def drawn(length, heads=3, size=8):
    q, k, v = torch.randn(3, 1, heads, length, size).unbind()
    return q, k, v


def test_an_eps_leads_from_the_plain_estimate_to_uniform_attention():
    q, k, v = drawn(30)
    rows = draw_projection(8, features=16, orthogonal=True, seed=0)
    plain = performer_attention(q, k, v, projection=rows, causal=False, scale=8**-0.5)
    torch.testing.assert_close(with_eps(q, k, v, rows=rows, eps=0.0), plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(with_eps(q, k, v, rows=rows, eps=1e9), v.mean(2, keepdim=True).expand_as(v))


def test_all_weight_is_captured_where_all_tokens_are_together_and_less_where_not():
    q, k, _ = drawn(64)
    assert captured(made("lsh", q, variant="shared", cluster=64), q, k) > 0.999
    assert captured_by_reformer(q, k, rounds=1, cluster=64) > 0.999
    few = made("lsh", q, variant="shared", cluster=8, rounds=1)
    assert 0 < captured(few, q, k) < 0.9
    assert 0 < captured_by_reformer(q, k, rounds=1, cluster=8) < 0.9


def test_writes_a_page_of_its_measurements(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.estimates.FEATURES", (8,))
    monkeypatch.setattr("bench.estimates.SEEDS", 1)
    monkeypatch.setattr("bench.estimates.ROUNDS", ((2, 16),))
    texts = [[drawn(40), drawn(40)], [drawn(40), drawn(40)]]
    source = {"name": "texts", "tokens": 40, "errors": errors(texts), "hashing": hashing(texts[0])}
    machine = {"processor": "a processor", "torch": "2"}
    record = {"command": "python x", "seeds": 1, "crowded": True, "sources": [source], "environment": machine}
    page = report(record, tmp_path)
    assert all(name in page for name in ("| uniform | – |", *EPS, "**aderf, fitted floor** | 8 |", "times are rough"))
    row = next(line for line in page.splitlines() if line.startswith("| 40 | 2 × 16 |"))
    assert row.count("|") == 4 + len(BUCKETS)
