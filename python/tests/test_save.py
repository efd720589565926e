import copy
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import ebb
from conftest import run_python
from test_manage import assert_equal, new_model, train


@pytest.fixture
def home():
    return ebb.Offloader(device="cpu", policy=ebb.policies.minimum_size(1))


def assert_same_tree(found, expected):
    leaves, structure = torch.utils._pytree.tree_flatten(found)
    expected_leaves, expected_structure = torch.utils._pytree.tree_flatten(expected)
    assert structure == expected_structure
    for a, b in zip(leaves, expected_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            assert type(a) is type(b) and a.dtype == b.dtype and a.requires_grad == b.requires_grad
            assert a.stride() == b.stride() and torch.equal(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("update_in", ["step", "next_use"])
@pytest.mark.parametrize("at_once", [1 << 24, 64])
def test_training_goes_on_from_a_checkpoint(home, tmp_path, monkeypatch, mmap, update_in, at_once):
    monkeypatch.setattr(ebb._optimizer, "_ELEMENTS_AT_ONCE", at_once)
    plain = new_model()
    optimizer = ebb.AdamW(plain.parameters(), lr=1e-2, amsgrad=True)
    train(plain, optimizer, home)
    expected = train(plain, optimizer, home, first=10)

    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = ebb.AdamW(model.parameters(), lr=1e-2, amsgrad=True, update_in=update_in)
    train(model, optimizer, home)
    ebb.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "checkpoint.pt")
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    assert_same_tree(dict(torch.load(tmp_path / "checkpoint.pt")["optimizer"]), optimizer.state_dict())

    with torch.device("meta"):
        model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    known = torch.load(tmp_path / "checkpoint.pt", mmap=mmap)
    model.load_state_dict(known["model"])
    optimizer = ebb.AdamW(model.parameters(), lr=1e-2, amsgrad=True, update_in=update_in)
    optimizer.load_state_dict(known["optimizer"])
    assert_equal(train(model, optimizer, home, first=10), expected)


class Marked(torch.Tensor):
    pass


def test_what_torch_saves_is_the_same(home, tmp_path):
    torch.manual_seed(1)
    base, managed = torch.randn(6, 4), torch.randn(40)
    home.manage([base, managed], device_bytes=0, minimum_bytes=0)
    marked = torch.nn.Parameter(torch.randn(3))
    marked.remark = "kept"
    what = {
        "views": [base[1:3], base.t(), base],
        "bits": torch.randn(3).bfloat16(),
        "numbers": [torch.tensor(3), torch.tensor(True), torch.empty(0), torch.arange(5)],
        "complex": torch.randn(3, dtype=torch.cfloat).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "marked": marked,
        "meta": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "storage": torch.arange(4.0).untyped_storage(),
        "subclass": torch.ones(3).as_subclass(Marked),
        "else": ("text", 1.5, None, {1, 2}),
        "managed": [managed, managed[3:7], managed.data.view(8, 5)],
    }
    ebb.save(what, tmp_path / "ours.pt")
    found = torch.load(tmp_path / "ours.pt", weights_only=False)
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][2].untyped_storage().data_ptr()
    assert found["storage"].tolist() == what["storage"].tolist()
    assert found["managed"][0].untyped_storage().data_ptr() == found["managed"][1].untyped_storage().data_ptr()
    assert found["marked"].remark == "kept" and isinstance(found["subclass"], Marked)
    assert found["meta"].is_meta and found["quantized"].is_quantized and found["else"] == what["else"]
    assert torch.equal(found["quantized"].dequantize(), what["quantized"].dequantize())
    for name in ("views", "bits", "numbers", "complex", "parameter", "managed"):
        plain = torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), what[name])
        kept = torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.detach(), found[name])
        for a, b in zip(torch.utils._pytree.tree_leaves(kept), torch.utils._pytree.tree_leaves(plain), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype


def test_a_sparse_tensor_over_managed_values_is_written(home, tmp_path):
    values = torch.arange(1.0, 4)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 4]]), values, (6,))
    expected = sparse.to_dense()
    home.manage([values], device_bytes=0, minimum_bytes=0)
    ebb.save(sparse, tmp_path / "sparse.pt")
    assert torch.equal(torch.load(tmp_path / "sparse.pt").to_dense(), expected)


@pytest.mark.parametrize("error", ["pickle", "disk", "folder", "reduce"])
def test_an_error_leaves_the_old_file(home, tmp_path, error):
    path = tmp_path / "checkpoint.pt"
    ebb.save({"old": torch.ones(3)}, path)
    managed = torch.ones(4096)
    home.manage([managed], device_bytes=0, minimum_bytes=0)
    if error == "pickle":
        with pytest.raises(Exception, match="pickle"):
            ebb.save({"new": managed, "function": lambda: None}, path)
    elif error == "disk":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                ebb.save({"new": managed}, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
    elif error == "folder":
        with pytest.raises(FileNotFoundError):
            ebb.save({"new": managed}, tmp_path / "nowhere" / "checkpoint.pt")
    else:
        with pytest.raises(RuntimeError, match="not this"):
            ebb.save({"new": [managed, Refuses()]}, path)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    assert torch.equal(torch.load(path)["old"], torch.ones(3))


class Refuses:
    def __reduce__(self):
        raise RuntimeError("not this")


KILLED = """
import sys, torch, ebb
path, ready = sys.argv[1:]
number = 0
while True:
    number += 1
    ebb.save({"number": number, "tensors": [torch.full((1 << 16,), float(number)) for _ in range(8)]}, path)
    if number == 3:
        open(ready, "w").close()
"""


@pytest.mark.parametrize("at", range(6))
def test_kill_leaves_one_whole_checkpoint(tmp_path, at):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path, ready = folder / "checkpoint.pt", tmp_path / "ready"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(path), str(ready)])
    deadline = time.monotonic() + 60
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ready.exists()
    time.sleep(0.0037 * at)
    process.kill()
    process.wait()
    known = torch.load(path)
    assert known["number"] >= 3
    assert all(torch.equal(each, torch.full((1 << 16,), float(known["number"]))) for each in known["tensors"])
    # A file that has been written, and has only its name for a moment, may be left.
    assert len(os.listdir(folder)) <= 2
    for each in folder.iterdir():
        torch.load(each)


def test_state_dicts_are_written_without_copies_of_everything(home, tmp_path, monkeypatch):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, home, steps=2)
    known = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = copy.deepcopy(known)
    with monkeypatch.context() as patched:
        patched.setattr("ebb._state_dict.to_host", None)
        ebb.save(known, tmp_path / "checkpoint.pt")
    found = torch.load(tmp_path / "checkpoint.pt")
    assert_same_tree(found, expected)
    assert found["model"]._metadata == expected["model"]._metadata
    assert found["model"]["0.weight"].data_ptr() == found["model"]["6.weight"].data_ptr()


def test_host_memory_holds_one_tensor_at_a_time(tmp_path):
    most, whole = map(int, run_python(f"PATH = {str(tmp_path / 'checkpoint.pt')!r}" + MEMORY).split())
    assert most < whole // 3


MEMORY = """
import gc, resource, torch, ebb
home = ebb.Offloader("cpu", ebb.policies.minimum_size(1))
count, bytes = 24, 8 << 20
with torch.device("meta"):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(bytes // 4)) for _ in range(count))
home.manage(model, device_bytes=0, minimum_bytes=0)
with torch.no_grad():
    for each in model:
        each.fill_(1.0)
ebb.save(torch.ones(3), PATH)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ebb.save(model.state_dict(), PATH)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, count * bytes)
"""


def test_one_storage_under_two_types_is_refused(home, tmp_path):
    tensor = torch.arange(4.0)
    home.manage([tensor], device_bytes=0, minimum_bytes=0)
    for other in (tensor.view(torch.int32), tensor.untyped_storage()):
        with pytest.raises(RuntimeError, match="different types"):
            ebb.save([tensor, other], tmp_path / "checkpoint.pt")
    assert os.listdir(tmp_path) == []


def test_a_signal_while_a_file_is_written_is_an_error_and_no_more(tmp_path):
    run_python(f"PATH = {str(tmp_path / 'checkpoint.pt')!r}" + INTERRUPTED, timeout=60)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


INTERRUPTED = """
import signal, torch, ebb
ebb.save(torch.ones(3), PATH)
tensors = [torch.ones(1 << 22) for _ in range(8)]
signal.signal(signal.SIGALRM, signal.default_int_handler)
interrupted = 0
for n in range(12):
    signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.007 * n)
    try:
        ebb.save(tensors, PATH)
    except KeyboardInterrupt:
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
assert interrupted > 0
ebb.save(torch.ones(3), PATH)
"""


INTERRUPTED_BETWEEN_LINES = """
import torch, ebb
from ebb import _save
ebb.save(torch.ones(3), PATH)
write, calls = _save._Records.write, 0

def interrupted(records, data):
    global calls
    calls += 1
    if calls == AT:
        raise KeyboardInterrupt
    return write(records, data)

_save._Records.write = interrupted
try:
    ebb.save([torch.ones(1 << 12)] * 2, PATH)
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("no error")
assert torch.load(PATH).numel() == 3
"""


@pytest.mark.parametrize("at", [1, 5, 12])
def test_a_signal_before_a_write_has_begun_is_an_error_and_no_more(tmp_path, at):
    run_python(f"PATH, AT = {str(tmp_path / 'checkpoint.pt')!r}, {at}" + INTERRUPTED_BETWEEN_LINES)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_links_and_permissions_stay(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ebb.save(torch.ones(2), os.fsencode(elsewhere / "checkpoint.pt"))
    (elsewhere / "checkpoint.pt").chmod(0o600)
    (tmp_path / "latest.pt").symlink_to(elsewhere / "checkpoint.pt")
    ebb.save(torch.ones(3), tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink() and torch.load(elsewhere / "checkpoint.pt").numel() == 3
    assert (elsewhere / "checkpoint.pt").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        ebb.save(torch.ones(3), elsewhere)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ebb: .*x\.pt cannot be written: there is no folder"):
        ebb.save({}, tmp_path / "none" / "x.pt")


def test_an_empty_path_is_no_file(home):
    with pytest.raises(FileNotFoundError):
        ebb.save({}, "")


@pytest.mark.parametrize("name", ["a" * 233, "a" * 234, "a" * 255, "\u00e4" * 127])
@pytest.mark.parametrize("has_nameless_files", [False, True])
def test_a_long_name_is_a_files(tmp_path, monkeypatch, name, has_nameless_files):
    if not has_nameless_files:
        monkeypatch.setattr("ebb._save._without_name", lambda folder: None)
    ebb.save(torch.ones(3), tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    assert torch.equal(torch.load(tmp_path / name), torch.ones(3))


def test_a_name_that_is_too_long_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._C.PyTorchFileWriter", None)
    with pytest.raises(OSError, match="too long"):
        ebb.save(torch.ones(3), tmp_path / ("a" * 256))


def test_a_program_that_saves_leaves_nothing_managed_behind(tmp_path):
    def run(home):
        layer = torch.nn.Linear(32, 32, bias=False)
        home.manage(layer, device_bytes=0, minimum_bytes=1)
        optimizer = ebb.AdamW(layer.parameters(), update_in="next_use")
        for step in range(3):
            layer(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                ebb.save({"optimizer": optimizer}, tmp_path / "checkpoint.pt")

    home = ebb.Offloader("cpu")
    for _ in range(3):
        run(home)
        gc.collect()
    other = torch.nn.Linear(4, 4, bias=False)
    home.manage(other, device_bytes=0, minimum_bytes=1)
    gc.collect()
    assert home.stats().managed.tensors == 1
