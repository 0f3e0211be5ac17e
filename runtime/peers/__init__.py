"""One tree over many machines: two daemons, and what they say to each other.

- between both: ``peering``, ``streams`` and ``lease`` are the protocol, without input and output;
  ``talking`` is a connection; ``post`` and ``registrations`` are what is kept of it; ``parcels``
  and ``contents`` are the files that cross, ``words`` the long texts
- at the lead: ``links`` has the commands, ``hello`` and ``complaints`` what they say; ``leading``
  has the agents that are away, by the link of each (``bylink``), ``bounds`` what hosts are told of
  them, ``replica`` what hosts tell, ``speaking`` their messages, ``returns`` their files
- at the host: ``hosting`` has the connections of leads; ``guests`` has their agents, ``admission``
  and ``putting`` what these may have, ``telling`` what leads are told, ``hearing`` their messages,
  ``supplies`` their files, ``keeping`` what they leave
"""
