"""Training drafts: data, the step, the run and the evaluation."""

import convert  # noqa: F401 - before all else, for what a Ctrl-C then does
