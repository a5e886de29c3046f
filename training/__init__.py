"""Training drafts: data, the step, the run and the evaluation."""
