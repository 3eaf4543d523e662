"""Reads the JSON reports that the plots are drawn from."""

import json
import pathlib


class ReportError(Exception):
    """A report that cannot be drawn; its text says why."""


def read_report(path):
    """What the JSON file holds. Raises ReportError."""
    try:
        return json.loads(pathlib.Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ReportError(f"{path}: is not JSON: {error}") from error
