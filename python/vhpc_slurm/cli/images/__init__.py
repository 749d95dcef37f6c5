# SPDX-License-Identifier: Apache-2.0
"""vhpc image: the images of the site, and those of a user."""
