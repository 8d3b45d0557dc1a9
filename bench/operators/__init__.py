"""Our own operators: their bandwidth beside a copy's, their time beside Inductor's."""
