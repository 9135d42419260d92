"""Show the values in the assertions of the shared helpers too."""

import pytest

pytest.register_assert_rewrite('tests.faults.fault_helpers')
