//! The cache folder. Its files may be deleted at any time.

use std::env;
use std::path::PathBuf;

/// `$XDG_CACHE_HOME/narrows`, or `~/.cache/narrows`; `None` where neither variable is an absolute path.
pub fn cache_dir() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let parent = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(parent.join("narrows"))
}
