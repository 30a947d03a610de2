"""Whatever a run writes or shows, a URL's user, password and query are not in it."""

import base64
import os
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from data.packs import packed, some_images
from light import few_looks, little_measuring, without_pictures
from rich.console import Console

import mae
from mae import credentials
from mae.cli import main
from mae.cli.launch import launch
from mae.credentials import VARIABLE, concealed, handed_on, is_partial, revealed, shown
from mae.data.remote.cache import FOLDER
from mae.experiments.core.job import Job
from mae.experiments.core.runner import run_jobs
from mae.records import read_json

USER, PASSWORD, SIGNATURES = "ulla-SECRET", "pass-SECRET", ("sig-SECRET-1", "sig-SECRET-2")
TINY = [
    "--model", "mae_vit_lesson_patch4", "--img-size", "8", "--patch-size", "2", "--mlp-ratio", "0.5",
    "--batch-size", "4", "--steps", "4", "--workers", "0", "--device", "cpu", "--checkpoint-every", "2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_held", {})
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    few_looks(monkeypatch)
    without_pictures(monkeypatch)
    little_measuring(monkeypatch)


@pytest.fixture
def guarded(tree: Callable[[dict[str, bytes]], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of a server that gives a pack of two classes to who knows user, password and a signature."""
    root = tmp_path_factory.mktemp("served")
    packed(root / "pk", tree(some_images(24)))
    known = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(root))

        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            signed = parse_qs(urlsplit(self.path).query).get("sig", [""])[0] in SIGNATURES
            if self.headers.get("Authorization") != known or not signed:
                self.send_error(403 if signed else 401)
            else:
                super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def whole(host: str, number: int = 0) -> str:
    return f"http://{USER}:{PASSWORD}@{host}/pk?sig={SIGNATURES[number]}"


def assert_no_secret(root: Path, said: str) -> None:
    found = [line for line in said.splitlines() if "SECRET" in line]
    assert not found, found
    files = [path for path in root.rglob("*") if path.is_file()]
    assert not [path for path in files if b"SECRET" in path.read_bytes() or "SECRET" in str(path)] and files


@pytest.mark.slow
def test_nothing_that_is_written_or_shown_holds_a_secret(guarded, tmp_path, capsys, monkeypatch):
    url, out = whole(guarded), str(tmp_path / "run")
    assert main(["plan", url, *TINY, "--steps", "300"]) == 0
    assert main(["doctor", url, *TINY]) in (0, 1)
    assert main(["pretrain", url, *TINY[:8], "--batch-size", "400", *TINY[10:]]) == 2
    assert main(["pretrain", url, *TINY, "--monitor", url]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "pk-lesson_patch4"
    assert main(["pretrain", f"--out={out}", *TINY, url]) == 0
    assert main(["watch", out, "--page", str(tmp_path / "page.html")]) == 0
    assert main(["evaluate", "knn", out, f"--data={url}", "--ks", "1", "--device", "cpu"]) == 0
    assert main(["embed", out, url, "--out", str(tmp_path / "features.npz"), "--device", "cpu"]) == 0
    assert main(["neighbours", out, url, "--out", str(tmp_path / "sheet.png"), "--device", "cpu"]) == 0
    assert main(["export", out, "--to", "official", "--out", str(tmp_path / "exported")]) == 0
    assert main(["doctor", out]) in (0, 1)
    assert main(["pack", url, str(tmp_path / "again")]) == 0
    assert main(["pack", "verify", url]) == 0
    for odd in (f"{url}x", f"http://{USER}:{PASSWORD}@127.0.0.1:x/pk", f"http:/{USER}:{PASSWORD}@{guarded}/pk"):
        assert main(["pretrain", odd, *TINY]) == 2
    for words in (["pretrain", url, url], ["pretrain", url, "--modle", "x"], ["show", url], ["evaluate", "knn", url]):
        with pytest.raises(SystemExit) if words[0] != "show" else monkeypatch.context():
            assert main(words) == 2
    printed = capsys.readouterr()
    assert f"Plan for http://{guarded}/pk" in printed.out and "without its user, password and query" in printed.out
    assert f"http://{guarded}/pk holds 24 images" in printed.err
    assert_no_secret(tmp_path, printed.out + printed.err)


def test_a_run_is_resumed_with_another_signature_and_says_what_is_missing(guarded, tmp_path, capsys, monkeypatch):
    def begin(*words: str) -> int:
        monkeypatch.setattr(credentials, "_held", {})  # as in a new process
        return main(["pretrain", *words, "--out", "run"])

    assert begin(whole(guarded), *TINY) == 0
    assert read_json(tmp_path / "run/config.json")["source"] == f"http://{guarded}/pk"
    assert begin("--resume") == 2
    told = capsys.readouterr().err
    assert f"http://{guarded}/pk/pack.json cannot be fetched: HTTP status 401" in told
    assert f"which no run keeps, set {VARIABLE} to it, or use ~/.netrc" in told
    assert begin(whole(guarded, 1), "--resume") == 0
    monkeypatch.setenv(VARIABLE, f"http://other/ {whole(guarded, 1)}")
    assert begin("--resume") == 0
    assert_no_secret(tmp_path, "")


def test_python_conceals_too(guarded, tmp_path):
    url, options = whole(guarded), {"steps": 2, "batch_size": 4, "img_size": 8, "patch_size": 2, "workers": 0}
    run = mae.pretrain(url, model="mae_vit_lesson_patch4", device="cpu", quiet=True, out="run", monitor=url, **options)
    mae.embed(run.folder, url, out="features.npz", device="cpu", quiet=True)
    mae.evaluate("knn", run.folder, data=url, test=None, device="cpu", quiet=True, ks=[1])
    assert_no_secret(tmp_path, repr(mae.RunConfig.of(source=url, monitor=url, init_from=url)))


def test_processes_are_handed_urls_in_their_environment(monkeypatch):
    given = {}

    def start(config: object, program: str) -> Callable[..., None]:
        return lambda *words: given.update(words=words, variable=os.environ[VARIABLE])

    monkeypatch.setattr("mae.cli.launch.elastic_launch", start)
    monkeypatch.setenv(VARIABLE, "http://a:b@c/d")
    words = ["pretrain", concealed("https://u:p@h/pk?q"), concealed("--monitor=https://u:p@h/mon")]
    assert launch(2, device="cpu", command=words) == 0
    assert given["words"] == ("-P", "-m", "mae", "pretrain", "https://h/pk", "--monitor=https://h/mon")
    assert given["variable"].split() == ["http://a:b@c/d", "https://u:p@h/pk?q", "https://u:p@h/mon"]
    assert handed_on() == {VARIABLE: given["variable"]}


def test_runs_of_a_study_are_handed_urls_in_their_environment(tmp_path, monkeypatch):
    given = {}

    def start(command: list[str], env: dict[str, str], **options: object) -> None:
        given.update(env)
        raise ProcessLookupError

    monkeypatch.setattr("mae.experiments.core.runner.subprocess.Popen", start)
    (tmp_path / "jobs").mkdir()
    data = concealed("https://u:p@h/pk?q")
    job = Job(
        variant="a",
        seed=0,
        folder=tmp_path / "a",
        data=data,
        data_root=tmp_path,
        device="cpu",
        evaluations=(),
        model="m",
    )
    with pytest.raises(ProcessLookupError):
        run_jobs(tmp_path, [job], console=Console(quiet=True))
    assert given[VARIABLE] == "https://u:p@h/pk?q" and job.data == "https://h/pk"


PLACES = {
    "http://h/pk": "http://h/pk",
    "http://u:p@h:80/pk?sig=a@b#c": "http://h:80/pk",
    "https://u@h": "https://h",
    "https://h/data@v2/pk": "https://h/data@v2/pk",
    "https://[::1]:8/a@b": "https://[::1]:8/a@b",
    "http://u:p/w@h/pk": "http://h/pk",
    "http://u:p?w@h/pk": "http://h/pk",
    "http://u:p#w@h/pk": "http://h/pk",
    "http://u:p@w@h/pk": "http://h/pk",
    "http://u:p w@h/pk": "http://h/pk",
    "http://u:p\nw@h/pk": "http://h/pk",
    "http:/u:p@h/pk?s": "http:/h/pk",
    "HTTPS:\\u:p@h/pk": "HTTPS:\\h/pk",
    "s3://key:secret@bucket/a": "s3://bucket/a",
    "chain::https://u:p@h/pk": "chain::https://h/pk",
}


@pytest.mark.parametrize("url", PLACES)
def test_of_a_url_the_place_is_shown_and_the_rest_found_again(url):
    place = PLACES[url]
    assert shown(url) == concealed(url) == place == shown(place)
    assert revealed(place) == url == revealed(url) and is_partial(place) == (place != url)
    assert concealed(f"--data={url}") == f"--data={place}"


@pytest.mark.parametrize("word", ["photos", "C:/photos?", "hf:a/b@c:train", "a b://", "--x=y@z?q", "/a@b/c?d", "imgs?"])
def test_what_is_no_url_stays(word):
    assert concealed(word) == word == revealed(word)
