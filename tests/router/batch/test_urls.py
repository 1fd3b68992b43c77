"""URLs that clients submit: what is read is below an allowed prefix, wherever links and redirects lead in the end."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tramontane.proto.errors import ConfigError, JobRefusedError
from tramontane.router.batch import urls
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
    assert [asyncio.run(_read(f"{prefix}/sub/a", *prefixes)) for prefix in prefixes] == [b"hello", SECRET]


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
    real = urls._canonicalize
    prefix = folders.prefix.replace("file", scheme, 1)
    assert asyncio.run(_read(f"{prefix}/sub/a", prefix)) == b"hello"

    def canonicalize(url: str) -> str:
        found = real(url)
        if url.endswith("/a"):
            swap(folders)
        return found

    monkeypatch.setattr(urls, "_canonicalize", canonicalize)
    with pytest.raises(JobRefusedError, match="not among the URLs"):
        asyncio.run(_read(f"{prefix}/sub/a", prefix))


@pytest.mark.parametrize("prefix", ["", "/data/in", "file:/data/in", "://data/in", "nonsense://data/in"])
def test_a_prefix_is_a_url_with_a_scheme_that_is_known(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix of URLs"):
        UrlReader(["file:///data/in", prefix])


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
    """A server whose pages are texts, or redirects if they begin with an arrow. It has two names, ``HOST`` and ``OTHER``."""

    pages: dict[str, str]
    asked: list[str] = field(default_factory=list)  # METHOD PATH
    url: str = ""


PAGES = {
    "/in/a": "hello",
    "/in/moved": "-> /in/a",
    "/in/relative": "-> a",
    "/in/twice": "-> /in/moved",
    "/in/out": "-> /secret",
    "/in/up": "-> ../secret",
    "/in/hidden": "-> /in/%2e%2e/secret",
    "/in/late": "-> /in/out",
    "/in/user": "-> //user@HOST/in/a",
    "/in/other": "-> http://OTHER/in/a",
    "/in/file": "-> file:///etc/passwd",
    "/in/nowhere": "->",
    "/secret": SECRET.decode(),
}


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(PAGES)

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
            self.send_response(302 if is_redirect else 200)
            if target := text.removeprefix("->").strip() if is_redirect else "":
                port = site.url.rpartition(":")[2]
                self.send_header("location", target.replace("HOST", f"127.0.0.1:{port}").replace("OTHER", f"localhost:{port}"))
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


@pytest.mark.parametrize("page", ["out", "up", "hidden", "late", "user", "other", "file", "nowhere", "changes"])
def test_a_redirect_elsewhere_is_not_followed(site: Site, page: str) -> None:
    """Whether it comes when the file is looked up or when it is read."""
    with pytest.raises(JobRefusedError) as refused:
        asyncio.run(_read(f"{site.url}/in/{page}", f"{site.url}/in"))
    assert "not among the URLs" in str(refused.value)
    assert "secret" not in str(refused.value), "where it leads is not for the client"
    assert {line.split(" ", 1)[1] for line in site.asked} <= {f"127.0.0.1 /in/{name}" for name in (page, "out")}


def test_a_page_of_another_allowed_host_may_be_led_to(site: Site) -> None:
    other = site.url.replace("127.0.0.1", "localhost")
    assert asyncio.run(_read(f"{site.url}/in/other", f"{site.url}/in", f"{other}/in/")) == b"hello"
