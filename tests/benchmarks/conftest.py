"""The programs need the packages of the extra `compare`, and a Unix; without them, none of these tests is collected."""

from importlib.util import find_spec

NEEDED = ("jinja2", "matplotlib", "pebble", "pydantic", "resource", "rich", "sklearn", "timm", "yaml")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["*"]
