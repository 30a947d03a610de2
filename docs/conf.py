"""How Sphinx makes a site of the pages: `make docs`. The Markdown stays as a repository's web view shows it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from mae.version import __version__

project = "openmae"
author = "The openmae authors"
project_copyright = "The openmae authors, Apache-2.0"
version = release = __version__

# The source folder is the repository's, so that links between README.md, docs/ and benchmarks/ hold as they are.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests"]

extensions = ["commands", "contents", "myst_parser", "public_names", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4  # as a repository's web view makes them
myst_enable_extensions = ["dollarmath"]
highlight_language = "none"

# Docstrings are in Google's style, and a single backtick marks code in them as it does in Markdown.
default_role = "literal"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # types stand in the signature already
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = f"openmae {__version__}"
html_copy_source = False
html_last_updated_fmt = None

nitpick_ignore_regex = [
    # Types of other projects: where they are described would have to be fetched from the network.
    ("py:.*", r"(collections|jaxtyping|matplotlib|numpy|pathlib|PIL|torch)\..*|Figure|Tensor"),
    # What public functions take or return without being a public name itself.
    ("py:.*", r"mae\.(config|data|evaluation|experiments|models)\..*|UnreadableImage"),
    # Types of attributes that Sphinx takes apart at the wrong place.
    ("py:class", r".*\[.*"),
]
