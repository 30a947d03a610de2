"""The page of a model, served or written, with its progress told."""

import webbrowser
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mae.records import whole_folder
from mae.report.terminal.console import stage
from mae.web.serve import HOST, make_server
from mae.web.site import write_site


def write_page(model: Path, out: Path, console: Console) -> None:
    """Write the page as a new folder; see `write_site`.

    Raises:
        UsageError: see `write_site`.
        MAEError: see `write_site` and `whole_folder`; nothing is left then.
    """
    with whole_folder(out) as staging, stage(console, "Writing the model as graphs"):
        site = write_site(model, staging)
    console.print(
        f"{out}: {site.checkpoints} {'checkpoint' if site.checkpoints == 1 else 'checkpoints'}; put the folder on any "
        "server of static files. Opened as a file it does not run.",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def serve_page(model: Path, *, port: int, open_browser: bool, console: Console) -> int:
    """Serve the page on 127.0.0.1 until Ctrl-C.

    Returns:
        The exit code.

    Raises:
        UsageError: see `write_site` and `make_server`.
        MAEError: see `write_site`.
    """
    with TemporaryDirectory(prefix="mae-web-") as folder:
        server = make_server(Path(folder), port)
        try:
            with stage(console, "Writing the model as graphs"):
                write_site(model, Path(folder))
            address = f"http://{HOST}:{server.server_address[1]}/"
            with suppress(KeyboardInterrupt):  # so serving ends; what stopped the writing left no page to serve
                console.print(f"{address}  (Ctrl-C ends)", highlight=False, soft_wrap=True)
                if open_browser:
                    webbrowser.open(address)
                server.serve_forever()
        finally:
            server.server_close()
    return 0
