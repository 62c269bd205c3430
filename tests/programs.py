"""Programs of the system that tests need: `@pytest.mark.needs_program("curl")`.

Where one is missing, its tests are skipped and the last lines say how to get it; with
`--require-programs` they fail.
"""

import contextlib
import shutil

_NAMES = {"chromium": ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")}


def path_of(program: str) -> str | None:
    """Where a program is; None where it is not installed."""
    return next(filter(None, map(shutil.which, _NAMES.get(program, (program,)))), None)


def how_to_get(program: str) -> str:
    """What is missing and how to get it, where packages are Debian's."""
    return f"{program} is not installed: apt-get install {_NAMES.get(program, (program,))[0]}"


@contextlib.contextmanager
def open_browser(*arguments):
    """Chromium, with these arguments."""
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=path_of("chromium"), timeout=60_000, args=arguments
        ) as browser,
    ):
        yield browser
