"""The report as it was written. To read one needs nothing of what makes one, so that it is on the screen at once."""

from __future__ import annotations

import msgspec

from ..core.errors import GpuwatchError
from ..core.text.shown import shown_name
from ..core.wire.regular_file import read_regular
from .paths import RunPaths
from .report.model import Report

MOST_REPORT_BYTES = 1 << 30


def read_report(paths: RunPaths) -> Report:
    """report.json, or what the store holds where there is none. Raises GpuwatchError when there is neither."""
    try:
        return msgspec.json.decode(read_regular(paths.report_json, MOST_REPORT_BYTES), type=Report)
    except FileNotFoundError:
        from .finish import report_from_store

        return report_from_store(paths)
    except OSError as error:
        raise GpuwatchError(f"expected a report in {paths.report_json}, it cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise GpuwatchError(
            f"expected a report of schema 1, found something else in {paths.report_json}: {shown_name(str(error))}; "
            f"to make it again from the store: gpuwatch report --again {paths.run_id}"
        ) from error
