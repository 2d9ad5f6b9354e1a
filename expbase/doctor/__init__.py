"""The doctor: it looks at an experiment from outside, and says what may be a mistake."""
