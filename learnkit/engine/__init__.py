# SPDX-License-Identifier: Apache-2.0
"""The training loop: events, callbacks, dispatch, and the loop itself."""
