"""An object store for tests: `gs://` paths, of etils.epath and of orbax, in a folder.

It is what etils has for fsspec, with the limits of such stores: a file is written as a whole, and
nothing is renamed or added to a file.
"""

import contextlib
import io
import os
import tempfile

import fsspec
from etils.epath import backend, gpath
from fsspec.implementations.dirfs import DirFileSystem
from orbax.checkpoint._src.path import gcs_utils  # which says how TensorStore reaches a bucket


class Bucket(type(backend.fsspec_backend)):
    """Paths `gs://NAME/...` are those of `root/gs:/NAME/...`."""

    def __init__(self, root):
        self._root = root
        self._fs = DirFileSystem(str(root), fsspec.filesystem("file", auto_mkdir=True))

    def at(self, path):
        return self._root / os.fspath(path)

    def fs(self, path):
        return self._fs

    def glob(self, path):
        return [os.fspath(x).replace("gs:/", "gs://") for x in self._fs.glob(path)]

    def open(self, path, mode):
        if "a" in mode:
            raise NotImplementedError("a store adds nothing to a file")
        return self.at(path).open(mode) if "r" in mode else self.written(path, mode)

    @contextlib.contextmanager
    def written(self, path, mode):
        stream = io.BytesIO() if "b" in mode else io.StringIO()
        yield stream
        content = stream.getvalue()
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=self._root.parent)
        with open(descriptor, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        os.replace(beside, self.at(path))

    def rename(self, path, dst):
        raise NotImplementedError("a store renames nothing")

    replace = rename


def opened(bucket, monkeypatch):
    """A store for `gs://` paths, for as long as the monkeypatch lasts."""

    def of_tensorstore(path):
        return {"driver": "file", "path": str(bucket.at(path))}

    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", bucket)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", of_tensorstore)
    # Whether a bucket has folders of its own, which orbax asks Google's client.
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    return bucket
