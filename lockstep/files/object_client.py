"""Reads and writes the objects of a bucket: S3, Google Cloud Storage and Azure, by obstore.

Whoever uses it gets the errors of files: FileNotFoundError, FileExistsError, DamagedBytesError, or
an OSError with the words of the service. Credentials come from the environment, as the services
name them (`AWS_ACCESS_KEY_ID` …), never from a config, and no text that leaves this module has
them. Does not import torch.

Tests: tests/checkpoint/test_object_store.py, tests/checkpoint/test_protocols.py
"""

import importlib
import json
import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from lockstep.errors import LockstepError, RunError, UsageError, first_line
from lockstep.files.damaged_bytes import DamagedBytesError

SCHEMES = ("s3", "gs", "az")
_URL = re.compile(r"(s3|gs|az)://([^/@?#\s]+)(/[^?#\s]*)?")

# The limits of obstore's retries, after pauses that grow up to 5 s: of server errors, connections
# that are lost, and reads that take too long. The time is what ends them: ten of them, obstore's
# own limit, pass in three seconds. A service that is away for a minute loses no checkpoint.
RETRIES = 10_000
RETRY_SECONDS = 120.0  # for a request and all its retries
_REQUEST_SECONDS = 30.0
_CHECK_SECONDS = 10.0  # of the retries while a run starts
_APART_SECONDS = 1800  # of what a process of its own does

# Where the environment names a server other than the service's own; one without TLS is asked for.
_ENDPOINTS = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
    "GOOGLE_BASE_URL",
)

# What the services answer that are asked for bytes after the end of an object.
_BEYOND_END = re.compile(r"status code: 416|<Code>InvalidRange</Code>")

_SECRET_OPTION = re.compile(r"secret|token|password|sas|key|credential", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE|GCP|GCS)_.*(KEY|SECRET|TOKEN|SAS|PASSWORD|CRED)")
_SHORTEST_SECRET = 4  # shorter values would blank out parts of words
_LONGEST_REASON = 300  # characters of an answer without a code

# What the services answer, and what it means for whoever starts a run.
_CREDENTIALS = (
    "the credentials are not accepted",
    "set those of the service in the environment of every rank (AWS_ACCESS_KEY_ID and"
    " AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY …)",
)
_MISSING = ("there is no such bucket", "create it, or mend the name in checkpoint.storage")
_DENIED = (
    "these credentials lack a right",
    "allow them to list, read, write and delete objects there",
)
_REGION = ("the bucket is in another region", "name its region: AWS_REGION, or args: {region: …}")
_NO_ETAGS = (
    "the service gives objects no ETag, which says whether one has changed",
    "use a service that gives them, or a newer version of this one",
)
_CLOCK = ("the clock of this machine is off", "set the clock (chronyd, systemd-timesyncd)")
_MEANINGS = {
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    "AuthenticationFailed": _CREDENTIALS,
    "AuthenticationRequired": _CREDENTIALS,
    "InvalidSecurity": _CREDENTIALS,
    "NoSuchBucket": _MISSING,
    "ContainerNotFound": _MISSING,
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AuthorizationPermissionMismatch": _DENIED,
    "AuthorizationFailure": _DENIED,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "RequestTimeTooSkewed": _CLOCK,
    "MissingETag": _NO_ETAGS,
}
# Words in answers of which obstore drops the code, or whose code says less.
_WORDS = {
    "Request date header too old": "RequestTimeTooSkewed",
    "Server failed to authenticate the request": "AuthenticationFailed",
    "ETag Header missing": "MissingETag",
    "redirect without LOCATION": "PermanentRedirect",
    "specified bucket does not exist": "NoSuchBucket",
}


def require_url(url: str, where: str) -> None:
    """Raise a UsageError unless a URL names a bucket of a known service, and nothing secret."""
    if _URL.fullmatch(url) is None:
        # the text may hold a password: it is not repeated
        raise UsageError(
            "the URL of a storage is not one of a bucket",
            where=where,
            fix="write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX;"
            " credentials belong in the environment",
        )


def require_options(options: Mapping[str, Any], where: str) -> None:
    """Raise a UsageError if an option would put a credential into the config, which is saved."""
    for name in options:
        if _SECRET_OPTION.search(name):
            raise UsageError(
                f"{name} is a credential, and a config is saved with its run",
                where=where,
                fix="set it in the environment of every rank, as the service names it",
            )


class ObjectClient:
    """The objects below a URL, by their keys.

    Args:
        url: `s3://bucket/prefix`, `gs://…` or `az://…`.
        retry_seconds: the limit for a request and all its retries.
        options: obstore's, such as `endpoint` and `region`.
    """

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS, **options: Any) -> None:
        where = "checkpoint.storage"
        require_url(url, where)
        require_options(options, f"{where}.args")
        self.url = url.rstrip("/")
        self._obstore = _import_obstore()
        named = (options.get("endpoint"), options.get("base_url"))
        endpoints = [*named, *map(os.environ.get, _ENDPOINTS)]
        client = {
            "timeout": timedelta(seconds=min(_REQUEST_SECONDS, retry_seconds)),
            "allow_http": any(str(endpoint).startswith("http://") for endpoint in endpoints),
        }
        retry = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=retry_seconds),
            "backoff": {"max_backoff": timedelta(seconds=5)},
        }
        if url.startswith("s3:"):
            # the service compares it with what it has received
            options = {"checksum_algorithm": "SHA256", **options}
        try:
            self._store = importlib.import_module("obstore.store").from_url(
                self.url, client_options=client, retry_config=retry, **options
            )
        except Exception as error:
            raise UsageError(
                f"{self.url} can't be used as a storage",
                where=where,
                why=_without_secrets(first_line(error)),
                fix="args takes the options of obstore's store of this service, such as endpoint"
                " and region",
            ) from None

    def put_new(self, key: str, data: Any) -> None:
        """Put an object on the condition that there is none, and compare its length.

        An object with the same bytes is the work of an earlier try of this request, of which the
        answer was lost. Raises a FileExistsError if there is another one.
        """
        with self._explained(key):
            try:
                self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                if self.get(key) != bytes(data):
                    raise FileExistsError(f"{self.url}/{key} exists already") from None
            except self._obstore.exceptions.NotSupportedError:
                raise _no_conditional_put(self.url) from None
            except FileNotFoundError as error:  # whatever the service calls it
                reason = _reason(str(error), "")
                raise ServiceError(f"{self.url}/{key}: {reason}", "NoSuchBucket") from None
        size = self.size(key)
        if size != len(data):
            raise OSError(f"{self.url}/{key} has {size} of the {len(data)} bytes that were sent")

    def put(self, key: str, data: bytes) -> None:
        """Put an object, in place of one that is there."""
        with self._explained(key):
            self._obstore.put(self._store, key, data, use_multipart=False)

    def get(self, key: str) -> bytes:
        """Return the bytes of an object."""
        with self._explained(key):
            return bytes(self._obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return some bytes of an object; a DamagedBytesError if it has fewer than `length`."""
        with self._explained(key):
            data = bytes(self._obstore.get_range(self._store, key, start=start, length=length))
        if len(data) != length:
            raise DamagedBytesError(f"{self.url}/{key} gave {len(data)} of {length} bytes")
        return data

    def get_within(self, key: str, limit: int) -> bytes | None:
        """Return the bytes of an object; None if it has more than `limit`, which are not read."""
        with self._explained(key):
            result = self._obstore.get(self._store, key)
            return None if result.meta["size"] > limit else bytes(result.bytes())

    def get_piece(self, key: str, start: int, length: int, size: int) -> memoryview:
        """Return some bytes of an object; a DamagedBytesError if it has not `size` bytes in all."""
        with self._explained(key):
            # all of an object is asked for as all of it: a range takes some servers a copy
            options = None if length == size else {"range": (start, start + length)}
            result = self._obstore.get(self._store, key, options=options)
            has = int(result.meta["size"])
            data = memoryview(result.bytes()).cast("B") if has == size else memoryview(b"")
        if has != size:
            raise DamagedBytesError(f"{self.url}/{key} has {has} bytes, where {size} were written")
        if len(data) != length:
            raise DamagedBytesError(f"{self.url}/{key} gave {len(data)} of {length} bytes")
        return data

    def size(self, key: str) -> int:
        """Return the number of bytes of an object."""
        with self._explained(key):
            return int(self._obstore.head(self._store, key)["size"])

    def exists(self, key: str) -> bool:
        """Return whether there is an object; the object is asked for, not a listing."""
        with suppress(FileNotFoundError):
            self.size(key)
            return True
        return False

    def modified(self, key: str) -> float:
        """Return when an object was put, in seconds since 1970."""
        with self._explained(key):
            return float(self._obstore.head(self._store, key)["last_modified"].timestamp())

    def inside(self, folder: str) -> list[str]:
        """Return the names of the objects and folders right below a folder."""
        with self._explained(folder):
            found = self._obstore.list_with_delimiter(self._store, folder)
        keys = [meta["path"] for meta in found["objects"]] + list(found["common_prefixes"])
        return sorted(key.rstrip("/").rpartition("/")[2] for key in keys)

    def below(self, folder: str) -> dict[str, float]:
        """Return the keys of all objects below a folder, with the times of their changes."""
        with self._explained(folder):
            found = self._obstore.list(self._store, folder).collect()
        return {meta["path"]: meta["last_modified"].timestamp() for meta in found}

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are gone already are passed over."""
        if not keys:
            return
        try:
            with self._explained(keys[0]):
                self._obstore.delete(self._store, list(keys))
        except FileNotFoundError:
            # Google and Azure say so, and obstore then leaves those that follow.
            for key in keys:
                with suppress(FileNotFoundError), self._explained(key):
                    self._obstore.delete(self._store, key)

    def check(self) -> None:
        """Write, read, list and delete a small object; raise a LockstepError if a run can't do so.

        A store that overwrites what it was asked to create can't tell a second writer: refused.
        """
        key = f"checks/{secrets.token_hex(8)}"
        try:
            self.put_new(key, b"first")
            try:
                self.put_new(key, b"second")
            except FileExistsError:
                pass
            else:
                raise _no_conditional_put(self.url)
            if self.get(key) != b"first":
                raise _no_conditional_put(self.url)
            self.inside("checks")
            self.delete([key])
        except OSError as error:
            raise _refusal(self.url, error, "checkpoint.storage") from None

    def check_readable(self) -> None:
        """Raise a LockstepError if the objects of a run to resume from can't be listed."""
        try:
            self.inside("commits")
        except OSError as error:
            raise _refusal(self.url, error, "--resume") from None

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Raise an OSError, without credentials, for an error of obstore."""
        try:
            yield
        except (LockstepError, FileExistsError, ServiceError):
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            text = str(error)
            code = _code(text)
            if isinstance(error, FileNotFoundError) and code not in _MEANINGS:
                raise FileNotFoundError(f"there is no {self.url}/{key}") from None
            if _BEYOND_END.search(text):
                what = f"{self.url}/{key} ends before the bytes that were written"
                raise DamagedBytesError(what) from None
            raise ServiceError(f"{self.url}/{key}: {_reason(text, code)}", code) from None


class ServiceError(OSError):
    """A request that the service refused, or that did not reach it, in its words; with its code."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


def client_of(arguments: Mapping[str, Any], *, starting: bool = False) -> ObjectClient:
    """Return the client that the arguments of a config's storage describe.

    While a run is `starting`, a service that does not answer is given up sooner.
    """
    options = {**arguments, "retry_seconds": _CHECK_SECONDS} if starting else {**arguments}
    return ObjectClient(options.pop("url"), **options)


def run_apart(work: Callable[[], object], about: str) -> None:
    """Run something that asks a service in a process of its own; raise here what it raises there.

    obstore has threads, which would not go on in ranks that are forks of this process.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_APART_SECONDS)  # a fork of threads could wait for a lock of theirs
            os.close(read)
            try:
                work()
                outcome: list[Any] = []
            except LockstepError as error:
                parts = [error.what, error.where, error.why, error.fix]
                outcome = [isinstance(error, UsageError), *parts]
            except OSError as error:
                outcome = [False, f"{about} has failed", None, str(error), None]
            with os.fdopen(write, "w") as stream:
                json.dump(outcome, stream)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    if not text:
        raise RunError(f"{about} has failed", why="the process that does it has died")
    outcome = json.loads(text)
    if outcome:
        is_usage, what, where, why, fix = outcome
        raise (UsageError if is_usage else RunError)(what, where=where, why=why, fix=fix)


def _import_obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise UsageError(
            "checkpoint.storage names a bucket, and obstore is not installed",
            where="checkpoint.storage",
            fix="pip install 'lockstep-train[cloud]'",
        ) from None


def _no_conditional_put(url: str) -> UsageError:
    return UsageError(
        f"{url} overwrites an object that it was asked to create",
        where="checkpoint.storage",
        why="without conditional writes two runs could commit the same checkpoint, and neither"
        " would be told",
        fix="use a service that has them (If-None-Match), or a newer version of this one",
    )


def _refusal(url: str, error: OSError, where: str) -> LockstepError:
    code = error.code if isinstance(error, ServiceError) else ""
    if code in _MEANINGS:
        meaning, fix = _MEANINGS[code]
        return UsageError(f"{url} can't be used: {meaning}", where=where, why=str(error), fix=fix)
    return RunError(
        f"{url} can't be used",
        where=where,
        why=str(error),
        fix="look whether this machine reaches the service (endpoint, proxy, firewall)",
    )


def _code(text: str) -> str:
    """Return the error code in an answer of a service, or an empty string."""
    match = re.search(r"<Code>(\w+)</Code>", text)
    given = "" if match is None else match[1]
    return next((code for words, code in _WORDS.items() if words in text), given)


def _reason(text: str, code: str) -> str:
    """Return what a service said, in a line, without credentials."""
    match = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if match is not None:
        return _without_secrets(f"{' '.join(match[1].split())} ({code})")
    first = text.partition("\n\nDebug source:")[0]
    return _without_secrets(" ".join(first.split())[:_LONGEST_REASON])


def _without_secrets(text: str) -> str:
    """Blank out the values of the environment's credentials, and signatures in URLs."""
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.fullmatch(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return re.sub(r"(?i)\b(sig|signature|x-amz-[a-z-]+)=[^&\s]+", r"\1=***", text)
