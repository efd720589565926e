"""Writes checkpoints one tensor at a time."""

import contextlib
import errno
import io
import os
import pickle
import secrets
import stat
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch

from ebb import _core
from ebb._managed import Joined
from ebb._optimizer import Optimizer
from ebb._state_dict import StateDict

_PROTOCOL = 2  # as torch.save's


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Writes what torch.load reads, with one tensor after the other in host memory, so that managed tensors can be saved.

        ebb.save({"model": model.state_dict(), "optimizer": optimizer}, "checkpoint.pt")
        known = torch.load("checkpoint.pt", mmap=True)    # reads a tensor when it is copied
        model.load_state_dict(known["model"])
        optimizer.load_state_dict(known["optimizer"])

    torch.load has all tensors on the CPU then, whatever device they were on: not all of them need fit on that.

    obj: what torch.save takes. An ebb optimizer in it is written as its state_dict(), without copies of all states, and
        so is a state_dict() of a module or of one of torch's optimizers.
    path: a file's. The file gets this name, and replaces the one that had it, when all of it is on the disk. Until then
        the file has no name, where the file system can do that (Linux's O_TMPFILE), and vanishes with the process;
        elsewhere its name is the path's, cut where that is long, with a random part and ".part" behind. A link is followed, and the
        old file's permissions stay.

    A tensor takes host memory until it is written, and the file the page cache's. Other streams' work on tensors must be
    done, as for torch.save. Raises OSError where the file cannot be written, and pickle.PicklingError, TypeError or
    AttributeError for what cannot be pickled, and RuntimeError for one storage under two types; the old file is then
    still there.
    """
    if not os.fspath(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(obj)
    texts = {"data.pkl": pickled.getvalue(), ".format_version": b"1", "byteorder": sys.byteorder.encode()}
    with _new_file(os.path.realpath(os.fsdecode(path))) as file:
        records = _Records(file)
        writer = torch._C.PyTorchFileWriter(records)
        try:
            for name, text in texts.items():
                writer.write_record(name, text, len(text))
            for key, read in pickler.storages.items():
                records.check()
                storage = read().untyped_storage()
                writer.write_record(f"data/{key}", storage, storage.nbytes())
            writer.write_end_of_file()
        except BaseException:
            # Otherwise the writer's destructor does this, and ends the process where write() has raised: a signal may
            # arrive before the first line of write().
            with contextlib.suppress(RuntimeError):
                writer.write_end_of_file()
            raise
        records.check()


class _Pickler(pickle.Pickler):
    """Leaves storages out, and knows how each is read."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.storages: dict[str, Callable[[], torch.Tensor]] = {}
        self._known: dict[int, tuple[str, Any]] = {}  # by storage: its key and type
        self._alive: list[Any] = []  # so that no address comes back

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, kind, numel = obj._untyped_storage, getattr(torch, obj._pickle_storage_type()), obj._size()
        elif isinstance(obj, torch.UntypedStorage):
            storage, kind, numel = obj, torch.UntypedStorage, obj.nbytes()
        elif isinstance(obj, _JoinedStorage):
            part = obj.parts[0]
            kind = getattr(torch, part._typed_storage()._pickle_storage_type())
            return "storage", kind, self._add(obj, obj.read), "cpu", obj.numel
        else:
            return None
        if storage._cdata not in self._known:
            self._known[storage._cdata] = self._add(storage, lambda: _copy(storage)), kind
        key, known_kind = self._known[storage._cdata]
        if kind is not known_kind:  # as torch.save, whose loader gives a storage one type
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        return "storage", kind, key, "cpu", numel

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Optimizer):
            has_hooks = bool(obj._optimizer_state_dict_post_hooks)  # these expect whole tensors
            known = obj.state_dict() if has_hooks else obj.state_dict(given=lambda value: value)
            return OrderedDict, (), None, None, iter(known.items())
        if isinstance(obj, StateDict):
            kind, arguments, attributes, _, _ = obj.__reduce__()
            return kind, arguments, attributes, None, iter(obj.managed_items())
        if isinstance(obj, Joined):
            stored = _JoinedStorage(obj.parts)
            strides = torch.empty(obj.shape, device="meta").stride()
            return torch._utils._rebuild_tensor_v2, (stored, 0, obj.shape, strides, False, OrderedDict())
        return NotImplemented

    def _add(self, alive: Any, read: Callable[[], torch.Tensor]) -> str:
        key = str(len(self.storages))
        self.storages[key] = read
        self._alive.append(alive)
        return key


class _JoinedStorage:
    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts, self.numel = parts, sum(part.numel() for part in parts)

    def read(self) -> torch.Tensor:
        return torch.cat([part.detach().cpu().flatten() for part in self.parts])


def _copy(storage: torch.UntypedStorage) -> torch.Tensor:
    whole = _core.bytes_of(storage)
    return whole.clone() if whole.is_cpu else whole.cpu()


class _Records:
    """What PyTorchFileWriter writes to. Its destructor goes on writing after an error, and lets none out."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            if self._error is None:
                self._file.write(data)
        except BaseException as error:  # KeyboardInterrupt, too; ValueError once the file is closed
            self._error = error
        return len(data)

    def check(self) -> None:
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """A file that gets the path's name at the end, unless there is an error."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileExistsError(f"ebb: {path} is there, and is no file")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"ebb: {path} cannot be written: there is no folder {folder}")
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # raises where no file can have this name, before anything is written
    part = _part_of(path)
    descriptor = _without_name(folder)
    has_name = descriptor is None
    if descriptor is None:
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if os.path.exists(path):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not has_name:
                os.link(f"/proc/self/fd/{file.fileno()}", part, src_dir_fd=file.fileno())  # linkat() follows the link
                has_name = True
        os.replace(part, path)
        has_name = False
    finally:
        if has_name:
            os.unlink(part)
    with contextlib.suppress(OSError):  # not every file system can do that with a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _part_of(path: str) -> str:
    """A name for the file until it is whole, and no longer than the path's where that is long."""
    ending = f".{secrets.token_hex(8)}.part"
    name = os.fsencode(os.path.basename(path))
    stem = name[: max(64, len(name) - len(ending))]
    return os.path.join(os.path.dirname(path), os.fsdecode(stem) + ending)


def _without_name(folder: str) -> int | None:
    """A new file in the folder that can be given a name later. None: not every file system, nor every system, has that."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except (OSError, AttributeError):
        return None
    if os.path.exists(f"/proc/self/fd/{descriptor}"):
        return descriptor
    os.close(descriptor)
    return None
