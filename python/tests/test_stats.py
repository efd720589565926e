import copy
import json
import pickle

import pytest
import torch

import ebb


def run(offloader, elements=1 << 16):
    leaf = torch.ones(elements, requires_grad=True)
    with offloader:
        x = leaf.exp().sin()
    offloader.drain()
    x.sum().backward()


def test_stats_are_typed_and_count_what_happened(offloader):
    run(offloader)
    stats = offloader.stats()
    assert isinstance(stats, ebb.Stats)
    assert stats.saved.tensors == stats.offloaded.tensors + stats.deduplicated.tensors
    assert stats.offloaded.bytes == stats.offloaded.tensors * 4 * (1 << 16)
    assert stats.fetched.tensors + stats.reused.tensors >= stats.offloaded.tensors
    assert stats.pool.peak_bytes >= stats.offloaded.bytes
    assert stats.pool.now_bytes == 0
    assert stats.saved_if_kept.peak_bytes == stats.offloaded.bytes
    assert stats.steps == 1
    assert set(stats.kept) >= {"parameter", "excluded", "policy", "no room"}
    assert "offloaded" in str(stats)
    assert repr(stats.saved).startswith("Count(tensors=")


def test_reset_sets_the_counts_to_zero(offloader):
    run(offloader)
    offloader.reset_stats()
    assert offloader.stats().saved.tensors == offloader.stats().offloaded.bytes == 0


def test_a_summary_is_one_line(offloader):
    run(offloader)
    assert "\n" not in offloader.summary()
    assert offloader.summary() in repr(offloader)


def test_drain_lets_go_of_what_is_copied():
    offloader = ebb.Offloader("cpu", ebb.policies.offload_everything(), stash_bytes="1GiB")
    leaf = torch.ones(1 << 20, requires_grad=True)
    with offloader:
        x = leaf.exp().sin()
    offloader.drain()
    assert offloader.stats().stash.now_bytes == 0
    x.sum().backward()


def test_evict_lets_go_of_what_was_kept():
    offloader = ebb.Offloader("cpu", ebb.policies.keep_everything(0))
    leaf = torch.ones(1 << 20, requires_grad=True)
    with offloader:
        x = (leaf * 1).exp().sin()
    assert offloader.stats().offloaded.tensors == 0
    freed = offloader.evict("1KB")
    assert freed > 0
    assert offloader.stats().evicted.bytes == freed
    x.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(1 << 20).exp().cos() * torch.ones(1 << 20).exp())


def test_explain_says_that_there_is_no_plan(offloader):
    assert offloader.explain().startswith("no plan")
    assert offloader.plan_report() is None


def test_a_timeline_rises_and_falls():
    offloader = ebb.Offloader("cpu", ebb.policies.keep_everything(0), record_timeline=True)
    run(offloader)
    samples = offloader.timeline()
    assert max(each.saved_on_device for each in samples) >= 1 << 18
    assert samples[-1].saved_on_device == 0
    assert [each.ms for each in samples] == sorted(each.ms for each in samples)
    assert any(each.backward for each in samples)
    assert offloader.timeline() == []


def test_a_trace_is_chromes_format():
    offloader = ebb.Offloader("cpu", ebb.policies.offload_everything(), record_trace=True)
    run(offloader)
    trace = json.loads(json.dumps(offloader.trace()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event["name"] for event in spans]
    assert names.count("copy out") == offloader.stats().offloaded.tensors
    assert {"pack", "unpack"} <= set(names)
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 for event in spans)
    rows = {event["tid"] for event in spans}
    assert rows == {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}


def test_what_was_not_recorded_is_a_value_error_that_names_the_option(offloader, tmp_path):
    with pytest.raises(ValueError, match="record_timeline=True"):
        offloader.timeline()
    with pytest.raises(ValueError, match="record_trace=True"):
        offloader.trace()
    with pytest.raises(ValueError, match="record_timeline=True"):
        ebb.plot(offloader, tmp_path / "memory.png")


def test_a_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    offloader = ebb.Offloader("cpu", ebb.policies.offload_everything(), record_timeline=True)
    with pytest.raises(ValueError, match="no sample"):
        ebb.plot(offloader, tmp_path / "memory.png")
    run(offloader)
    ebb.plot(offloader, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_an_offloader_is_neither_copied_nor_pickled(offloader):
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="pickled or copied"):
            make(offloader)


def test_help_reads_like_a_manual():
    import pydoc

    text = pydoc.render_doc(ebb, renderer=pydoc.plaintext)
    assert "with offloader:" in text
    assert "device_budget: as fast as possible within so many bytes" in text
    for name in ("Offloader", "wrap", "checkpoint", "plot", "no_offload"):
        assert getattr(ebb, name).__doc__
