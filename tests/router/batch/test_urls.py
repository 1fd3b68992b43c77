"""URLs that clients submit: what is read is below an allowed prefix, wherever links and redirects
lead in the end.
"""

import asyncio
import os
import posixpath
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pytest
from batch_jobs import all_results, new_batch_harness
from examples import examples
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tramontane.proto.errors import ConfigError, JobRefusedError
from tramontane.proto.jobs import JobOptions
from tramontane.router.batch import urls
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.urls import UrlReader

SECRET = b"a secret"


async def _read(url: str, *prefixes: str) -> bytes:
    return b"".join([piece async for piece in UrlReader(prefixes).read(url)])


# ---- files


@dataclass
class Folders:
    """An allowed folder next to one that is not, of the same shape."""

    inside: Path
    outside: Path

    @property
    def prefix(self) -> str:
        return f"file://{self.inside}"


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders(tmp_path / "in", tmp_path / "in-secret")
    for folder, text in ((folders.inside, b"hello"), (folders.outside, SECRET)):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "a").write_bytes(text)
    return folders


def test_each_of_several_folders_may_be_read(folders: Folders) -> None:
    prefixes = [folders.prefix, f"file://{folders.outside}"]
    assert [asyncio.run(_read(f"{prefix}/sub/a", *prefixes)) for prefix in prefixes] == [
        b"hello",
        SECRET,
    ]


def _swap_file(folders: Folders) -> None:
    (folders.inside / "sub" / "a").unlink()
    (folders.inside / "sub" / "a").symlink_to(folders.outside / "sub" / "a")


def _swap_folder(folders: Folders) -> None:
    (folders.inside / "sub").rename(folders.inside / "before")
    (folders.inside / "sub").symlink_to(folders.outside / "sub")


def _swap_prefix(folders: Folders) -> None:
    folders.inside.rename(folders.inside.with_name("before"))
    folders.inside.symlink_to(folders.outside)


@pytest.mark.parametrize("swap", [_swap_file, _swap_folder, _swap_prefix])
@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_link_that_appears_after_the_check_leads_nowhere(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, swap: Callable[[Folders], None], scheme: str
) -> None:
    """Between the moment at which the path is resolved and the one at which the file is opened."""
    real = os.open
    prefix = folders.prefix.replace("file", scheme, 1)
    assert asyncio.run(_read(f"{prefix}/sub/a", prefix)) == b"hello"

    def swap_and_open(path: str, flags: int) -> int:
        swap(folders)
        return real(path, flags)

    monkeypatch.setattr(urls.os, "open", swap_and_open)
    with pytest.raises(JobRefusedError, match="not among the URLs"):
        asyncio.run(_read(f"{prefix}/sub/a", prefix))


@pytest.mark.parametrize(
    "prefix", ["", "/data/in", "file:/data/in", "://data/in", "nonsense://data/in"]
)
def test_a_prefix_is_a_url_with_a_scheme_that_is_known(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix of URLs"):
        UrlReader(["file:///data/in", prefix])


@pytest.mark.parametrize(
    "prefix", ["ftp://127.0.0.1:1/x", "ftp://no-such-host.invalid/x", "zip://x"]
)
def test_a_prefix_or_a_storage_that_cannot_be_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """Some file systems connect, or open a file, as soon as they are made."""
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    for make, name in (
        (lambda: UrlReader([prefix]), "jobs_url_prefixes"),
        (lambda: JobStorage(prefix), "jobs_storage"),
    ):
        with pytest.raises(ConfigError) as refused:
            make()
        assert f"({name}) is {prefix!r}, which cannot be used: " in str(refused.value)
        assert "\n" not in str(refused.value)


def test_links_that_stay_inside_are_followed_and_others_are_not(folders: Folders) -> None:
    (folders.inside / "good").symlink_to(folders.inside / "sub")
    (folders.inside / "bad").symlink_to(folders.outside / "sub")
    for scheme in ("file", "local"):
        prefix = folders.prefix.replace("file", scheme, 1)
        assert asyncio.run(_read(f"{prefix}/good/a", prefix)) == b"hello"
        with pytest.raises(JobRefusedError):
            asyncio.run(_read(f"{prefix}/bad/a", prefix))


def test_what_is_no_file_is_refused_and_not_waited_for(folders: Folders) -> None:
    os.mkfifo(folders.inside / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("pipe", "sub", "missing", "sub/a/b"):
        with pytest.raises(JobRefusedError):
            asyncio.run(_read(f"{folders.prefix}/{name}", folders.prefix))
    assert len(os.listdir("/proc/self/fd")) == before


# ---- redirects


@dataclass
class Site:
    """A server whose pages are texts, or redirects if they begin with an arrow. It has two names,
    ``HOST`` and ``OTHER``.
    """

    pages: dict[str, str]
    asked: list[str] = field(default_factory=list)  # METHOD PATH
    url: str = ""
    status: int = 200
    encoding: str = "identity"


PAGES = {
    "/in/a": "hello",
    "/in/moved": "-> /in/a",
    "/in/relative": "-> a",
    "/in/twice": "-> /in/moved",
    "/in/out": "-> /secret",
    "/in/up": "-> ../secret",
    "/in/sibling": "-> /in2/secret",
    "/in2/secret": SECRET.decode(),
    "/in/hidden": "-> /in/%2e%2e/secret",
    "/in/late": "-> /in/out",
    "/in/user": "-> //user@HOST/in/a",
    "/in/other": "-> http://OTHER/in/a",
    "/in/file": "-> file:///etc/passwd",
    "/in/nowhere": "->",
    "/in/tab": "-> /in/.\t./secret",
    "/in/double": "-> /in/%252e%252e/secret",
    "/in/semicolon": "-> /in/..;/secret",
    "/in/latin": "-> /in/\xe9",
    "/in/circle": "-> /in/circle",
    "/secret": SECRET.decode(),
}


HOSTILE_PAGES = ("tab", "double", "semicolon", "latin")


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(dict(PAGES))

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            site.asked.append(f"{self.command} {self.headers['host'].split(':')[0]} {self.path}")
            text = site.pages.get(self.path, "")
            if self.path == "/in/changes":
                text = "hello" if self.command == "HEAD" else "-> /secret"
            is_redirect = text.startswith("->")
            self.send_response(302 if is_redirect else site.status)
            self.send_header("content-encoding", site.encoding)
            if target := text.removeprefix("->").strip() if is_redirect else "":
                port = site.url.rpartition(":")[2]
                self.send_header(
                    "location",
                    target.replace("HOST", f"127.0.0.1:{port}").replace(
                        "OTHER", f"localhost:{port}"
                    ),
                )
            body = b"redirected" if is_redirect else text.encode()
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if with_body else b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield site
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("page", ["a", "moved", "relative", "twice"])
def test_a_redirect_to_an_allowed_url_is_followed(site: Site, page: str) -> None:
    assert asyncio.run(_read(f"{site.url}/in/{page}", f"{site.url}/in")) == b"hello"


@pytest.mark.parametrize(
    "page",
    [
        "out",
        "up",
        "sibling",
        "hidden",
        "late",
        "user",
        "other",
        "file",
        "nowhere",
        "changes",
        *HOSTILE_PAGES,
    ],
)
def test_a_redirect_elsewhere_is_not_followed(site: Site, page: str) -> None:
    """Whether it comes when the file is looked up or when it is read."""
    with pytest.raises(JobRefusedError) as refused:
        asyncio.run(_read(f"{site.url}/in/{page}", f"{site.url}/in"))
    assert "not among the URLs" in str(refused.value)
    assert "secret" not in str(refused.value), "where it leads is not for the client"
    assert {line.split(" ", 1)[1] for line in site.asked} <= {
        f"127.0.0.1 /in/{name}" for name in (page, "out")
    }


def test_a_page_of_another_allowed_host_may_be_led_to(site: Site) -> None:
    other = site.url.replace("127.0.0.1", "localhost")
    assert asyncio.run(_read(f"{site.url}/in/other", f"{site.url}/in", f"{other}/in/")) == b"hello"


def test_redirects_end(site: Site) -> None:
    with pytest.raises(JobRefusedError, match="more than 10 times"):
        asyncio.run(_read(f"{site.url}/in/circle", f"{site.url}/in"))
    assert len(site.asked) == 11


@pytest.mark.parametrize(
    ("status", "encoding", "words"), [(404, "identity", "404"), (200, "gzip", "compressed")]
)
def test_an_error_of_a_server_comes_without_its_words(
    site: Site, status: int, encoding: str, words: str
) -> None:
    site.status, site.encoding = status, encoding
    with pytest.raises(JobRefusedError, match=words) as refused:
        asyncio.run(_read(f"{site.url}/in/a", f"{site.url}/in"))
    assert "hello" not in str(refused.value)


# ---- URLs that mean another place to a server than to the check

HOSTILE = {
    "sibling": "/in2/secret",
    "dots": "/in/../secret",
    "encoded dots": "/in/%2e%2e/secret",
    "one encoded dot": "/in/.%2E/secret",
    "double encoding": "/in/%252e%252e/secret",
    "fourfold encoding": "/in/%252525252e%252525252e/secret",
    "plain after four decodings": "/in/%25252561",
    "encoded slash": "/in/..%2fsecret",
    "tab": "/in/.\t./secret",
    "line feed": "/in/.\n./secret",
    "carriage return": "/in/.\r./secret",
    "encoded tab": "/in/.%09./secret",
    "encoded line feed": "/in/a%0a",
    "encoded carriage return": "/in/.%0d./secret",
    "NUL": "/in/.\0./secret",
    "encoded NUL": "/in/a%00",
    "DEL": "/in/a\x7f",
    "backslash": "/in/..\\secret",
    "encoded backslash": "/in/%5c..%5csecret",
    "semicolon": "/in/..;/secret",
    "semicolon with a parameter": "/in/..;a=b/secret",
    "dots and a space": "/in/.. /secret",
    "overlong dots": "/in/%c0%ae%c0%ae/secret",
    "other letters": "/in/\u00e9",
    "wide dots": "/in/\uff0e\uff0e/secret",
    "fragment": "/in/#/../../secret",
    "query": "/in/?/../../secret",
    "chain": "/in/a::/secret",
    "length": "/in/" + "a" * 8192,
}


@pytest.mark.parametrize("tail", HOSTILE.values(), ids=list(HOSTILE))
def test_a_url_that_may_mean_another_place_is_not_requested(site: Site, tail: str) -> None:
    with pytest.raises(JobRefusedError, match="not among the URLs"):
        asyncio.run(_read(site.url + tail, f"{site.url}/in"))
    assert site.asked == []


AUTHORITIES = (
    "x@HOST",
    "x:y@HOST",
    "HOST.",
    "HOST:1",
    "HOST\\@other",
    "b\u00fccher.example",
    "xn--bcher-kva.example",
    "",
    "0x7f.1",
)


@pytest.mark.parametrize("authority", AUTHORITIES)
def test_a_url_of_another_server_or_user_is_not_requested(site: Site, authority: str) -> None:
    host = site.url.removeprefix("http://")
    with pytest.raises(JobRefusedError, match="not among the URLs"):
        asyncio.run(_read(f"http://{authority.replace('HOST', host)}/in/a", f"{site.url}/in"))
    assert site.asked == []


@pytest.mark.parametrize("tail", ["/in/a", "/in/./a", "/in/a?x=1", "/in/a#b", "/in/%252561"])
def test_a_url_is_compared_as_it_was_parsed(site: Site, tail: str) -> None:
    upper = site.url.replace("http", "HTTP", 1)
    site.pages |= {"/in/a?x=1": "hello", "/in/%252561": "hello"}
    assert asyncio.run(_read(upper + tail, f"{site.url}/in")) == b"hello"
    assert site.asked == [f"GET 127.0.0.1 {tail.replace('/./', '/').partition('#')[0]}"]


def test_the_port_of_a_scheme_may_be_named() -> None:
    """So that a prefix with it covers URLs without it. No server is asked: there is none, and the
    prefix is not it.
    """
    covered = [
        urls._http_prefix(prefix).covers(urls._parse_http(url))
        for prefix in ("https://h/in", "https://h:443/in")
        for url in (
            "https://h/in/a",
            "https://h:443/in/a",
            "HTTPS://H:443/in/a",
            "https://h:80/in/a",
            "http://h/in/a",
        )
    ]
    assert covered == [True, True, True, False, False] * 2


@pytest.mark.parametrize(
    "url",
    [
        "FILE://IN/sub/a",
        "file:IN/sub/a",
        "file://localhostIN/sub/a",
        "file://IN/%2e%2e/in-secret/sub/a",
    ],
)
def test_other_spellings_of_files_are_not_read(folders: Folders, url: str) -> None:
    with pytest.raises(JobRefusedError):
        asyncio.run(_read(url.replace("IN", str(folders.inside)), folders.prefix))


@pytest.mark.parametrize(
    "url",
    [
        "memory://in/%2e%2e/secret",
        "memory://in/.\t./secret",
        "MEMORY://in/a",
        "memory:///in/../secret",
    ],
)
def test_a_store_is_asked_for_what_is_below_the_prefix(url: str) -> None:
    MemoryFileSystem().pipe({"/in/a": b"hello", "/secret": SECRET})
    assert asyncio.run(_read("memory://in/a", "memory://in")) == b"hello"
    with pytest.raises(JobRefusedError, match="not among the URLs"):
        asyncio.run(_read(url, "memory://in"))


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("odd://in/a", True),
        ("odd://in/elsewhere", False),
        ("odd://in/a?version=/../secret", False),
        ("odd://in", False),
    ],
)
def test_the_path_that_a_file_system_has_parsed_is_compared(
    monkeypatch: pytest.MonkeyPatch, url: str, is_allowed: bool
) -> None:
    """A file system may read a URL in a way of its own, as this one does: it puts one folder
    elsewhere.
    """

    class Odd(MemoryFileSystem):
        protocol = "odd"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("odd://").replace("in/elsewhere", "secret").strip("/")

    fsspec.register_implementation("odd", Odd, clobber=True)
    Odd().pipe({"/in/a": b"hello", "/secret": SECRET})
    if is_allowed:
        assert asyncio.run(_read(url, "odd://in")) == b"hello"
        return
    with pytest.raises(JobRefusedError, match="not among the URLs"):
        asyncio.run(_read(url, "odd://in"))


@pytest.mark.parametrize(
    "prefix",
    ["http://u@h/in", "http:///in", "http://h:x/in", "file:///d\u00e4ta", "http://h/\t", "c:///in"],
)
def test_a_prefix_of_no_url_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="is a prefix of no URL"):
        UrlReader([prefix])


PARTS = (
    "..",
    ".",
    "/",
    "\\",
    "%2e",
    "%2f",
    "%5c",
    "%252e",
    "%09",
    "\t",
    "\n",
    "\r",
    "\0",
    ";",
    "?",
    "#",
    "@",
    ":",
    "%",
    " ",
    "\u00e9",
    "a",
    "in",
    "secret",
)


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=8).map("".join),
    st.booleans(),
)
def test_what_a_server_sees_lies_below_the_prefix(site: Site, tail: str, is_redirect: bool) -> None:
    """However a server reads a path: it may decode it again and again, drop controls and
    parameters, and turn backslashes.
    """
    site.asked.clear()
    url = f"{site.url}/in/{tail}"
    if is_redirect:
        site.pages["/in/there"] = (
            f"-> {url.translate(dict.fromkeys((10, 13))).encode().decode('latin-1')}"
        )
        url = f"{site.url}/in/there"
    with suppress(JobRefusedError):
        asyncio.run(_read(url, f"{site.url}/in"))
    for line in site.asked:
        path = line.split(" ", 2)[2].partition("?")[0]
        while (decoded := unquote(path)) != path:
            path = decoded
        path = re.sub(r"[\x00-\x20\x7f]", "", path).replace("\\", "/")
        path = "/".join(segment.partition(";")[0] for segment in path.split("/"))
        assert f"{posixpath.normpath(path)}/".startswith("/in/"), line


SECRET_LINES = [
    b'{"url": "SECRET", "custom_id": "a", "body": {}}',
    b'{"method": "SECRET", "custom_id": "b", "body": {}}',
    b'{"custom_id": "c", "methodS": 1, "body": {}}',
    b'{"custom_id": "SECRET\\u0000", "body": {}}',
    b'{"custom_id": "e", "body": "SECRET"}',
    b"SECRET",
    b'"SECRET"',
    b'{"SECRET": 1, "SECRET"}',
]


def test_errors_of_lines_repeat_nothing_that_was_read_from_a_url(tmp_path: Path) -> None:
    """Not all that lies below a prefix was made for the client; of a text that it has sent itself
    they quote the fault.
    """
    (tmp_path / "in").write_bytes(b"\n".join(SECRET_LINES))

    async def sent() -> AsyncIterator[bytes]:
        yield b"\n".join(SECRET_LINES)

    async def errors() -> list[str]:
        with closing(
            new_batch_harness(tmp_path).service(url_prefixes=(f"file://{tmp_path}",))
        ) as service:
            of_url = await service.submit_url(f"file://{tmp_path}/in", JobOptions())
            of_text = await service.submit(sent(), JobOptions())
            return [
                str([await all_results(service, job.job_id), job.error])
                for job in (of_url, of_text)
            ]

    of_url, of_text = asyncio.run(errors())
    assert "SECRET" not in of_url
    assert ("methodS" in of_url, "methodS" in of_text) == (False, True)
    assert of_url.count("invalid_line") == len(SECRET_LINES)
    assert of_text.count("SECRET") >= 3
