"""What has state among the attributes of an experiment."""
