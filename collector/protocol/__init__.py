"""What the collector does about what it hears: who may speak, who is asked, when it ends. Pure decisions."""
