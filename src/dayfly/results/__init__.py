"""What a job came to, gathered for comparing: by agent version and task."""
