"""The application that the commands join."""

from cyclopts import App

from agfa import __version__

SUMMARY = "Domain generalisation: train an image classifier on a few known sources; it holds on one never seen."
app = App(
    name="agfa",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help=f"{SUMMARY}\n\nAdd --debug to any command for tracebacks.",
)
