"""An object store for tests: `gs://` paths, of etils.epath and of orbax, in a folder.

It has what such stores have: a file is written as a whole; there are no folders but as parts of
names; nothing can be added to a file, linked or locked.
"""

import contextlib
import io
import os
import shutil
import tempfile

import fsspec
from etils.epath import backend, gpath
from fsspec.implementations.dirfs import DirFileSystem
from orbax.checkpoint._src.path import gcs_utils  # which says how TensorStore reaches a bucket


class Bucket(backend.Backend):
    """Paths `gs://NAME/...` are those of `root/NAME/...`; `seen` is what was done, in order."""

    def __init__(self, root):
        self._root, self.seen = root, []

    def at(self, path):
        return self._root / os.fspath(path).removeprefix("gs://")

    def open(self, path, mode):
        if "a" in mode:
            raise NotImplementedError("a store adds nothing to a file")
        if "r" in mode:
            return self.at(path).open(mode)
        return self._written(path, mode)

    @contextlib.contextmanager
    def _written(self, path, mode):
        stream = io.BytesIO() if "b" in mode else io.StringIO()
        yield stream
        content = stream.getvalue()
        self.seen.append(("write", os.fspath(path)))
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=self._root.parent)
        with open(descriptor, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        os.replace(beside, self.at(path))

    def exists(self, path):
        at = self.at(path)
        return at.is_file() or self.isdir(path)

    def isdir(self, path):
        return any(x.is_file() for x in self.at(path).rglob("*"))

    def listdir(self, path):
        if not self.isdir(path):
            raise FileNotFoundError(path)
        return [
            x.name for x in self.at(path).iterdir() if x.is_file() or self.isdir(f"{path}/{x.name}")
        ]

    def glob(self, path):
        before, _, pattern = os.fspath(path).rpartition("/")
        return [f"{before}/{x.name}" for x in self.at(before).glob(pattern)]

    def walk(self, top, *, top_down=True, on_error=None):
        raise NotImplementedError

    def makedirs(self, path, *, exist_ok=False, mode=None):
        pass

    mkdir = makedirs

    def rmtree(self, path):
        if not self.exists(path):
            raise FileNotFoundError(path)
        self.seen.append(("remove", os.fspath(path)))
        at = self.at(path)
        shutil.rmtree(at) if at.is_dir() else at.unlink()

    def remove(self, path):
        self.seen.append(("remove", os.fspath(path)))
        self.at(path).unlink()

    def rename(self, path, dst):
        self.seen.append(("rename", os.fspath(path)))
        shutil.move(self.at(path), self.at(dst))

    replace = rename

    def copy(self, path, dst, overwrite):
        shutil.copyfile(self.at(path), self.at(dst))

    def stat(self, path):
        return backend.os_backend.stat(self.at(path))


class FsspecBucket(type(backend.fsspec_backend)):
    """Likewise, by what etils has for fsspec, on a file system of fsspec's."""

    def __init__(self, root):
        self._root = root
        local = fsspec.filesystem("file", auto_mkdir=True)
        self._fs = DirFileSystem(str(root), local)

    def at(self, path):
        return self._root / os.fspath(path)

    def fs(self, path):
        return self._fs

    def glob(self, path):
        return [os.fspath(x).replace("gs:/", "gs://") for x in self._fs.glob(path)]


def opened(bucket, monkeypatch):
    """A store for `gs://` paths, for as long as the monkeypatch lasts."""

    def of_tensorstore(path):
        return {"driver": "file", "path": str(bucket.at(path))}

    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", bucket)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", of_tensorstore)
    # Whether a bucket has folders of its own, which orbax asks Google's client.
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    return bucket
