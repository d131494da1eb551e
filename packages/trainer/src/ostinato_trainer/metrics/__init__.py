"""What a run says of itself, under the field's names; docs/metrics.md lists them."""
