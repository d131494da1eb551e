"""Token-exact chat conversations for any chat template: encode each message once, keep sampled tokens verbatim."""
