"""Hooks of mkdocs: links that leave docs/ lead to files of the repository, not of the site."""
