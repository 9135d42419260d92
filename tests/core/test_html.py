"""Tables as HTML: well-formed, escaped, and shortened if they are long."""

from xml.etree import ElementTree

from learnkit.core.html import table


def test_a_table_is_well_formed_and_escaped() -> None:
    html = table(['<name>', 'loss'], [['a & b', 0.5], ['"c"', None]], '<b>')
    page = ElementTree.fromstring(f'<div>{html}</div>')
    rows = [[cell.text or '' for cell in row] for row in page.iter('tr')]
    assert rows == [['<name>', 'loss'], ['a & b', '0.500000'], ['"c"', '']]
    sides = [cell.get('style', '').rpartition(':')[2] for cell in page.iter('td')]
    assert sides == ['left', 'right'] * 2
