"""The accelerator: copies and events, pinned and huge-page memory."""
