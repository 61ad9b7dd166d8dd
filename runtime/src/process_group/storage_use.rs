//! Long reads and writes of files by a process of a run.

use std::sync::Arc;

use super::{ClusterError, ProcessGroup};

/// Reads or writes of long files, for which other processes wait beyond their timeout until the value is dropped.
pub struct StorageUse {
    /// `None` for a run of one process.
    group: Option<Arc<dyn ProcessGroup>>,
}

impl StorageUse {
    /// Begins to use storage, in a run of several processes if there is a group.
    pub fn begin(group: Option<Arc<dyn ProcessGroup>>) -> StorageUse {
        if let Some(group) = &group {
            group.begin_storage_use();
        }
        StorageUse { group }
    }

    /// The processes of the run.
    pub fn group(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.group.as_ref()
    }

    /// Checks that no other process has ended the run meanwhile.
    ///
    /// # Errors
    /// A process that has.
    pub fn check(&self, operation: &str) -> Result<(), ClusterError> {
        self.group.as_ref().and_then(|group| group.failure(operation)).map_or(Ok(()), Err)
    }
}

impl Drop for StorageUse {
    fn drop(&mut self) {
        if let Some(group) = &self.group {
            group.end_storage_use();
        }
    }
}
