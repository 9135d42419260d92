"""The training loop: events, callbacks, dispatch, and the loop itself."""
