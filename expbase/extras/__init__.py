"""What the core does not know: mixins, components, runs from YAML."""
