"""`mae.explore`: open a run and its images, make every section, write the page."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mae.config import RunConfig
from mae.credentials import concealed
from mae.data.dataset.sampled import sample
from mae.data.sources.names import check_exists
from mae.data.sources.open import Source, open_all, open_source
from mae.errors import UsageError
from mae.evaluation.common.task import UnlabelledTask
from mae.evaluation.extractors.extractor import Extractor, show_loaded
from mae.evaluation.extractors.open import open_extractor, usual_folder
from mae.evaluation.extractors.opened import MAX_UNREADABLE
from mae.exploration.explored import FEATURE, ExploreRun, Projection, labels_of
from mae.exploration.projection import check_projection
from mae.exploration.sections import SECTIONS
from mae.exploration.thumbnails import MOST_IMAGES
from mae.exploration.unusual_images import write_list
from mae.randomness import FIXED_EPOCH
from mae.records import check_new
from mae.report.html.page import Section, write_page
from mae.report.terminal.console import stage
from mae.training.checkpoint import good_checkpoints
from mae.training.device import choose_device
from mae.training.run_folder import RunFolder

PAGE = "explore.html"
_SEED = 0


def explore(
    run: str | Path,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    images: int = 2000,
    map: Projection = "pca",
    pictures: str | Path | None = None,
    list: str | Path | None = None,
    data_root: str | Path = "data",
    device: str = "auto",
    quiet: bool = False,
) -> Path:
    """Write one self-contained page on what a run learned of its images; like the command `mae explore`.

    The page holds a map of the images by their features, images and patches that are alike to the model, and images
    that are odd or there twice. It fetches nothing; its one script draws the map.

    Args:
        run: a run folder, one of its checkpoints or a model's `.safetensors` file.
        data: images, see `mae.embed`; labelled ones are coloured by class. None: those that the run trained on.
        out: the page, a new file; None: `explore.html` in the run's folder, written anew each time.
        images: how many are looked at, drawn by chance, the same ones each time; all where there are fewer.
        map: `pca`, two principal components; or `umap`, which keeps neighbours together (`openmae[umap]`).
        pictures: a folder for each picture as a PNG file; None: they are in the page alone.
        list: a new `.csv` with a row for each odd image and each pair of duplicates.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        quiet: show nothing.

    Returns:
        The page.

    Raises:
        UsageError: a model or images that are not there, a file that is, or a wrong option.
        MAEError: images or a model that cannot be read, or a disk that is full.
    """
    _check(out=out, images=images, pictures=pictures, listing=list)
    check_projection(map)
    console, root = Console(quiet=quiet), Path(data_root)
    extractor = open_extractor(str(run), device=choose_device(device))
    if extractor.model is None:
        raise UsageError(f"{run} is a model of another project; expected a run folder or a .safetensors file of mae")
    show_loaded(console, extractor.loaded)
    folder = RunFolder(Path(run)) if RunFolder(Path(run)).holds_run else None
    spec = concealed(str(data)) if data is not None else _own_source(run, folder, root)
    with stage(console, f"Reading the images of {spec}"):
        # Of its own images a run has seen those that `open_source` gives; of others all were asked for.
        source = _some((open_source if data is None else open_all)(spec, data_root=root), images)
        labels, class_names = labels_of(source, spec, data_root=root)
    usual = usual_folder(str(run), extractor)
    with _folder_of_pictures(pictures) as place:
        explored = ExploreRun(
            folder=folder,
            checkpoints={} if folder is None else good_checkpoints(folder.checkpoints),
            task=UnlabelledTask(
                extractor=extractor,
                source=source,
                folder=usual,
                device=choose_device(device),
                seed=_SEED,
                console=console,
                max_unreadable=_max_unreadable(folder if data is None else None),
            ),
            labels=labels,
            class_names=class_names,
            projection=map,
            pictures=place,
        )
        page = usual / PAGE if out is None else Path(out)
        title = f"What {Path(run).resolve().name} learned"
        write_page(page, title=title, facts=_facts(explored, spec), sections=_sections(explored))
        if list is not None:
            write_list(explored, Path(list))
    return page


def _check(*, out: str | Path | None, images: int, pictures: str | Path | None, listing: str | Path | None) -> None:
    """Refuse what is not asked for rightly, before there is any work."""
    if not 3 <= images <= MOST_IMAGES:
        raise UsageError(f"--images is {images}; expected 3 to {MOST_IMAGES:,}, which a page can hold")
    for path, suffix, option in ((out, ".html", "out"), (listing, ".csv", "list")):
        if path is None:
            continue
        if Path(path).suffix != suffix:
            raise UsageError(f"--{option} is {path}; expected a name that ends in {suffix}")
        check_new(Path(path))
    if pictures is not None and Path(pictures).exists() and not _is_empty_folder(Path(pictures)):
        raise UsageError(f"--pictures is {pictures}, which is there and is not an empty folder; give another name")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _own_source(run: str | Path, folder: RunFolder | None, data_root: Path) -> str:
    if folder is None:
        raise UsageError(f"{run} is a model, which comes with no images; name some with --data")
    source = RunConfig.read(folder.config).source
    try:
        check_exists(source, data_root=data_root)
    except UsageError as error:
        raise UsageError(f"the images of the run {run}: {error}; name others with --data") from error
    return source


def _max_unreadable(folder: RunFolder | None) -> float:
    """Share of the images that may be unreadable; of a run's own no fewer than it was told itself."""
    told = 0.0 if folder is None else RunConfig.read(folder.config).data.max_unreadable
    return max(told, MAX_UNREADABLE)


def _some(source: Source, count: int) -> Source:
    """So many images of a source, in its order."""
    if len(source) <= count:
        return source
    numbers = sample(source, _SEED, FIXED_EPOCH, count).sort().values.numpy()
    return source.take(numbers, f"{source.note}; {count:,} of {len(source):,} images, drawn")


@contextmanager
def _folder_of_pictures(asked: str | Path | None) -> Iterator[Path]:
    """Where pictures are drawn; the folder asked for is empty again where the work ends early, to be asked for anew."""
    if asked is None:
        with TemporaryDirectory(prefix="mae-explore-") as place:
            yield Path(place)
        return
    Path(asked).mkdir(parents=True, exist_ok=True)
    try:
        yield Path(asked)
    except BaseException:
        for picture in Path(asked).glob("*.png"):
            picture.unlink(missing_ok=True)
        raise


def _sections(explored: ExploreRun) -> list[Section]:
    made = []
    for make in SECTIONS:
        with stage(explored.console, f"Making the section: {make.__name__.replace('_', ' ')}"):
            made.append(make(explored))
    return [section for section in made if section is not None]


def _facts(explored: ExploreRun, spec: str) -> list[tuple[str, str]]:
    extractor: Extractor = explored.task.extractor
    classes = f"{len(explored.class_names)} classes" if explored.class_names else "no classes"
    facts = [
        ("model", extractor.loaded or extractor.name),
        ("images", f"{len(explored.numbers):,} of {spec} ({explored.task.source.note}), {classes}"),
        ("feature", f"{FEATURE}, minus its mean over these images"),
    ]
    if explored.folder is not None:
        facts.append(("checkpoints kept", ", ".join(f"step {step:,}" for step in explored.checkpoints) or "none"))
    return facts
