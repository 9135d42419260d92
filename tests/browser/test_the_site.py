"""The site in a browser: search finds a page about a word, in light and dark, on large and small screens."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.building import ROOT

SHOTS = Path(__file__).with_name('shots')
GUIDES = [f'guides/{path.stem}' for path in sorted((ROOT / 'nbs').glob('*.ipynb'))]
PAGES = ['index', 'lifecycle', 'howto/best_model', 'api/learner', 'api/learner_train', *GUIDES]
pytestmark = pytest.mark.browser


def test_a_search_leads_to_the_page(tab: Any, address: str) -> None:
    tab.goto(f'{address}/index.html')
    assert tab.locator('h1').inner_text().startswith('learnkit')
    tab.locator('.sidebar-search').fill('accumulation')
    tab.keyboard.press('Enter')

    result = tab.locator('#search-results li a', has_text='learnkit.callbacks.accumulation').first
    result.wait_for()
    assert 'learnkit' in result.inner_text()
    result.click()
    tab.wait_for_url('**/api/train.html*')
    assert tab.locator('h1').inner_text().startswith('Train')
    assert 'number of samples of a step' in tab.locator('article').inner_text()

    tab.locator('article a', has_text='OptionError').first.click()
    tab.wait_for_url('**/api/errors.html#learnkit.core.errors.OptionError')
    assert tab.locator('[id="learnkit.core.errors.OptionError"]').is_visible()


@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 390], ids=['desk', 'phone'])
def test_pages_fit_the_window_and_follow_its_colours(
    tab: Any, address: str, scheme: str, width: int
) -> None:
    SHOTS.mkdir(exist_ok=True)
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({'width': width, 'height': 900})
    for page in PAGES:
        tab.goto(f'{address}/{page}.html')
        tab.screenshot(path=SHOTS / f'site-{page.replace("/", "-")}-{scheme}-{width}.png')
        assert tab.evaluate('document.documentElement.scrollWidth') <= width, page
        style = 'getComputedStyle(document.body)'
        text, ground = tab.evaluate(f'[{style}.color, {style}.backgroundColor]')
        assert (brightness(text) < brightness(ground)) == (scheme == 'light')
    tab.goto(f'{address}/lifecycle.html')
    drawn = tab.evaluate('getComputedStyle(document.querySelector("svg.lifecycle text")).fill')
    assert abs(brightness(drawn) - brightness(text)) < 30  # the drawing takes the text's colour


def brightness(colour: str) -> float:
    "Return the mean of red, green and blue of `rgb(...)`."
    return sum(float(part) for part in colour.partition('(')[2].rstrip(')').split(',')[:3]) / 3
