"""What the tools share: servers, clients, prompt sets, figures, reports."""
